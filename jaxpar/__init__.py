"""jaxpar: a JAX/XLA sharding-based training toolkit."""

from jaxpar import errors, mesh, pipeline, testing
from jaxpar.annotate.annotate import auto_annotate
from jaxpar.batch import TOKENS, token_shapes
from jaxpar.errors import (
    BackendError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    JaxparError,
    ModelError,
    PlanError,
)
from jaxpar.mesh import make_mesh, simulate
from jaxpar.model import Context, Stack, Term, named, save, stack, steer, steered
from jaxpar.parallel.cross_entropy import cross_entropy, cross_entropy_and_z_loss
from jaxpar.parallel.embedding import embedding_lookup
from jaxpar.plan import Capacity, Dropless, Hybrid, Pipeline, Plan, Zero
from jaxpar.planner.search import search
from jaxpar.planner.space import Space
from jaxpar.program import Program
from jaxpar.run import Run
from jaxpar.state import TrainState
from jaxpar.training.per_layer import per_layer

__all__ = [
    "TOKENS",
    "BackendError",
    "BatchError",
    "Capacity",
    "CheckpointError",
    "ConfigError",
    "Context",
    "DataError",
    "Dropless",
    "Hybrid",
    "JaxparError",
    "ModelError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Program",
    "Run",
    "Space",
    "Stack",
    "Term",
    "TrainState",
    "Zero",
    "auto_annotate",
    "cross_entropy",
    "cross_entropy_and_z_loss",
    "embedding_lookup",
    "errors",
    "make_mesh",
    "mesh",
    "named",
    "per_layer",
    "pipeline",
    "save",
    "search",
    "simulate",
    "stack",
    "steer",
    "steered",
    "testing",
    "token_shapes",
]
