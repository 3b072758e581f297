"""The parity table of pipelines as values: schedules alone on every grid, and composed with everything else."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optax

from experiments import two_stacks
from experiments.pairwise import Row, pairwise
from experiments.parity_table import make_batch
from jaxpar import TOKENS, Plan, Program
from jaxpar.batch import BatchAxes
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.vit import IMAGES, ViTConfig

Batch = dict[str, np.ndarray]

# Wide enough that rounding is far from what is allowed. A vocabulary that no number of stages divides.
TOY = LlamaConfig(vocab_size=61, num_layers=8, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64)
LENGTH = 16
GPT = GPTConfig(61, 11, 32, num_heads=4, mlp_dim=64, num_positions=LENGTH, dropout=0.1, z_loss_coef=0.01)
VIT = ViTConfig(16, 4, 10, 11, 32, num_heads=4, mlp_dim=64, dropout=0.1)

# name -> schedule, whether weights' gradients fill idle slots.
SCHEDULES = {
    "gpipe": ("gpipe", False),
    "1f1b": ("1f1b", False),
    "interleaved": ("interleaved", False),
    "zero_bubble": ("zero_bubble", False),
    "zero_bubble fill": ("zero_bubble", True),
    "zero_bubble_v": ("zero_bubble_v", False),
    "zero_bubble_v fill": ("zero_bubble_v", True),
}

# By parts (stages x virtual stages): 11 layers, not as the balanced cut has them.
STAGE_LAYERS = {2: (4, 7), 4: (2, 4, 1, 4), 8: (1, 2, 1, 1, 3, 1, 1, 1)}


def _tokens(kind: str, rows: int) -> Batch:
    return make_batch(kind, rows, TOY.vocab_size, LENGTH)


@dataclass(frozen=True)
class Case:
    """A model, its batches of several kinds, and what of the plan goes with it."""

    build: Any
    kinds: tuple[str, ...] = ("uneven",)
    batch_axes: BatchAxes | None = None
    make: Callable[[str, int], Batch] = _tokens
    precision: str = "float32"
    stage_layers: bool = False


def _images(kind: str, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, *VIT.image_shape)).astype(np.float32)
    return {"image": images, "label": rng.integers(0, VIT.num_classes, rows).astype(np.int32)}


def _vectors(kind: str, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, two_stacks.WIDTH)).astype(np.float32)
    return {"x": x, "targets": rng.integers(0, 7, rows).astype(np.int32)}


_UNEVEN = replace(TOY, num_layers=11)
CASES: dict[str, Case] = {
    "alone": Case(replace(TOY, num_layers=16).build),
    "weights": Case(TOY.build, ("uneven", "one token", "masked")),
    "11 layers": Case(_UNEVEN.build),
    "stage_layers": Case(_UNEVEN.build, stage_layers=True),
    "tied": Case(replace(TOY, tie_embeddings=True).build),
    "packed": Case(TOY.build, ("packed",)),
    "embed 35": Case(replace(TOY, embed_dim=35).build),
    "1 kv head": Case(replace(TOY, num_kv_heads=1).build),
    "bfloat16": Case(_UNEVEN.build, precision="bfloat16"),
    "within node": Case(TOY.build),
    "two stacks": Case(partial(two_stacks.TwoStacks, 5, 4), batch_axes=two_stacks.AXES, make=_vectors),
    "GPT": Case(GPT.build),
    "ViT": Case(VIT.build, batch_axes=IMAGES, make=_images),
}

# Alone.
STAGES, VIRTUAL, MICROBATCHES = (2, 4, 8), (1, 2), (1, 2, 3, 4, 5, 8, 12)

# Composed. Eight devices as four nodes of two, for the mesh that "within node" has alone.
WITHIN_NODE, DEVICES_PER_NODE = "data=4,pipe=2", 2
FACTORS: dict[str, list[Any]] = {
    "case": [name for name in CASES if name != "alone"],
    "schedule": list(SCHEDULES),
    "mesh": ["data=2,pipe=2,tensor=2", "data=2,pipe=4", "pipe=4,tensor=2", WITHIN_NODE],
    "microbatches": [3, 8],
    "zero": [0, 1, 2, 3],
    "remat": ["none", "dots", "full", "named:attention,mlp"],
    "norms": [False, True],
}


@dataclass(frozen=True)
class Cell:
    """One entry of the table. `norms`: sequence_sharded_norms."""

    case: str
    schedule: str
    mesh: str
    microbatches: int
    virtual_stages: int = 1
    zero: int = 0
    remat: str = "none"
    norms: bool = False

    def __str__(self) -> str:
        return ", ".join(str(value) for value in (self.case, self.schedule, self.mesh, f"m={self.microbatches}"))

    def plan(self) -> Plan:
        """Raises `PlanError` where the schedule has no such plan."""
        name, fill = SCHEDULES[self.schedule]
        case = CASES[self.case]
        plan = Plan(
            self.mesh,
            zero=self.zero,
            within_node=self.case == "within node",
            microbatches=self.microbatches,
            sequence_sharded_norms=self.norms,
            precision=case.precision,  # type: ignore[arg-type]
            remat=self.remat,
            pipeline=name,
            virtual_stages=self.virtual_stages,
            fill=fill,
        )
        parts = plan.shape.pipe * (2 if name == "zero_bubble_v" else self.virtual_stages)
        return replace(plan, stage_layers=STAGE_LAYERS[parts]) if case.stage_layers else plan

    def program(self) -> Program:
        case = CASES[self.case]
        return Program(case.build, optax.sgd(0.1), self.plan(), batch_axes=case.batch_axes or TOKENS)

    @property
    def rows(self) -> int:
        """As few as every part can have one of."""
        data = 1 if "data" not in self.mesh else int(self.mesh[5])
        return next(rows for rows in (24, 20, 32) if rows % (data * self.microbatches) == 0)


def cells() -> Iterator[Cell]:
    """The whole table."""
    for row in pairwise(FACTORS, allowed):
        yield Cell(**row, virtual_stages=2 if row["schedule"] == "interleaved" else 1)
    for name, stages, virtual, microbatches in itertools.product(SCHEDULES, STAGES, VIRTUAL, MICROBATCHES):
        if (SCHEDULES[name][0], virtual) != ("zero_bubble_v", 1):  # it has two, given or not
            yield Cell("alone", name, f"pipe={stages}", microbatches, virtual)


def allowed(row: Row) -> bool:
    """Combinations that mean something, and that are not refused: the grids alone have all that are."""
    within = row["case"] == "within node"
    if within != (row["mesh"] == WITHIN_NODE) or (within and row["zero"] == 0):
        return False
    if row["norms"] and (row["case"] == "two stacks" or "tensor" not in row["mesh"]):
        return False
    if row["case"] in ("GPT", "ViT") and "mlp" in row["remat"]:  # their layers save no such name
        return False
    if row["case"] == "two stacks" and row["schedule"] not in ("gpipe", "1f1b", "zero_bubble"):
        return False
    return not ("fill" in row["schedule"] and row["microbatches"] == 3 and "pipe=4" in row["mesh"])
