"""What a search is asked: a model, its optimizer, one step's batch, a cluster, and what must stay as it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.batch import TOKENS, BatchAxes, local_positions
from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import Device
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.structure_work import work_of
from jaxpar.estimate.system import JAXPAR, System
from jaxpar.estimate.work import Work
from jaxpar.plan import Plan
from jaxpar.planner.calibration import Calibration
from jaxpar.planner.space import Sizes, Space
from jaxpar.structure import Build, Structure, inspect_model

# Of a device's memory: CUDA's context, NCCL's buffers and fragmentation take the rest.
USABLE = 0.9


@dataclass(frozen=True)
class Question:
    """See `jaxpar.search`. What depends on the model alone is computed once.

    `budget`: bytes that a step may take on each device; None: `USABLE` of its memory. `calibration`: what measured
    steps taught.
    """

    build: Build
    optimizer: optax.GradientTransformation
    cluster: Cluster
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    base: Plan = field(default_factory=Plan)
    space: Space = field(default_factory=Space)
    batch_axes: BatchAxes = field(default_factory=lambda: TOKENS)
    experts_per_token: int | None = None
    budget: int | None = None
    system: System = JAXPAR
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not self.shapes or any(not x.shape for x in self.shapes.values()):
            raise ConfigError(f"a step's batch needs arrays with rows, found {dict(self.shapes)}; see token_shapes")

    @cached_property
    def structure(self) -> Structure:
        return inspect_model(self.build)

    @cached_property
    def work(self) -> Work:
        active = self.experts_per_token
        if active is None:  # `config.build` of a model's config
            active = getattr(getattr(self.build, "__self__", None), "experts_per_token", None)
        return work_of(self.structure, active)

    @cached_property
    def device(self) -> Device:
        """Of a mixed cluster, the one that sets the pace."""
        return self.cluster.pace

    @cached_property
    def devices_per_node(self) -> int:
        return min(part.devices_per_node for part in self.cluster.parts)

    @property
    def rows(self) -> int:
        return next(iter(self.shapes.values())).shape[0]

    @cached_property
    def length(self) -> int:
        """Positions of a row; where a batch has none, those that the model has parameters for."""
        positions = [
            size
            for info in self.structure.params.values()
            for name, size in zip(info.names, info.dims, strict=True)
            if name == "positions"
        ]
        return local_positions(self.batch_axes, self.shapes) or max(positions, default=1)

    @property
    def limit(self) -> int:
        """Bytes that a step may take on each device."""
        return int(USABLE * self.device.memory_bytes) if self.budget is None else self.budget

    @cached_property
    def sizes(self) -> Sizes:
        layers = tuple(self.structure.stack_lengths.values())
        experts, heads = (max(getattr(layer, of) for layer, _ in self.work.layers) for of in ("experts", "heads"))
        return Sizes(self.cluster.size, self.rows, self.length, layers, experts, heads)

    @cached_property
    def state_bytes(self) -> float:
        """Of the optimizer's state, for each parameter."""
        params = {
            path: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype))
            for path, info in self.structure.params.items()
        }
        leaves: list[Any] = jax.tree.leaves(jax.eval_shape(self.optimizer.init, params))
        total = sum(prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
        return total / sum(prod(info.shape) for info in self.structure.params.values())
