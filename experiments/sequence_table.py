"""The parity table of sequence parallelism as values: every mode on every mesh, composed with everything else."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optax

from experiments.pairwise import Row, pairwise
from experiments.parity_table import make_batch
from experiments.sequence_model import TwoStacks
from jaxpar import Plan, Program
from models.gpt import GPTConfig
from models.llama import LlamaConfig

Batch = dict[str, np.ndarray]

VOCAB, LENGTH, ROWS = 61, 48, 8
TOY = LlamaConfig(VOCAB, num_layers=4, embed_dim=32, num_heads=8, num_kv_heads=2, head_dim=8, mlp_dim=64)
GPT = GPTConfig(VOCAB, 4, 32, num_heads=8, mlp_dim=64, num_positions=LENGTH, dropout=0.1, z_loss_coef=0.01)

# name -> attention, ulysses.
MODES: dict[str, tuple[Any, int]] = {
    "ring": ("ring", 1),
    "ulysses": ("ulysses", 1),
    "allgather": ("allgather", 1),
    "hybrid": ("ring", 2),
}


@dataclass(frozen=True)
class Case:
    """A model, its batches of several kinds, and the dtype it computes in."""

    build: Any
    kinds: tuple[str, ...] = ("uneven",)
    precision: str = "float32"


CASES: dict[str, Case] = {
    "weights": Case(TOY.build, ("uneven", "one token", "first part", "two tokens")),
    "packed": Case(TOY.build, ("packed", "5, 6, 5")),
    "8 kv heads": Case(replace(TOY, num_kv_heads=8, tie_embeddings=True).build),
    "1 kv head": Case(replace(TOY, num_kv_heads=1, embed_dim=35).build),
    "GPT": Case(GPT.build),
    "two stacks": Case(partial(TwoStacks, VOCAB)),
    "bfloat16": Case(TOY.build, precision="bfloat16"),
}

FACTORS: dict[str, list[Any]] = {
    "case": list(CASES),
    "mode": list(MODES),
    "mesh": [
        "seq=2",
        "seq=4",
        "seq=8",
        "data=2,seq=4",
        "tensor=2,seq=4",
        "data=2,tensor=2,seq=2",
        "pipe=2,tensor=2,seq=2",
        "data=2,pipe=2,seq=2",
    ],
    "schedule": ["1f1b", "zero_bubble", "gpipe"],
    "zero": [0, 1, 2, 3],
    "microbatches": [2, 4],
    "remat": ["none", "dots", "full", "named:attention"],
}


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    case: str
    mode: str
    mesh: str
    schedule: str
    zero: int
    microbatches: int
    remat: str

    def __str__(self) -> str:
        return ", ".join(str(value) for value in (self.case, self.mode, self.mesh, self.schedule, f"zero {self.zero}"))

    @property
    def plan(self) -> Plan:
        attention, ulysses = MODES[self.mode]
        return Plan(
            self.mesh,
            zero=self.zero,
            microbatches=self.microbatches,
            precision=CASES[self.case].precision,  # type: ignore[arg-type]
            remat=self.remat,
            pipeline=self.schedule,
            attention=attention,
            ulysses=ulysses,
        )

    @property
    def program(self) -> Program:
        return Program(CASES[self.case].build, optax.sgd(0.1), self.plan)


def cells() -> Iterator[Cell]:
    """The whole table: a cover in which every two choices that are allowed together meet."""
    for row in pairwise(FACTORS, allowed):
        yield Cell(**row)


def allowed(row: Row) -> bool:
    """Combinations that differ from one another: a schedule needs a pipeline, and Ulysses its heads."""
    return "pipe" in row["mesh"] or row["schedule"] == "1f1b"


def batch(kind: str, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """Random tokens whose weights are of this kind."""
    if kind not in ("first part", "two tokens", "5, 6, 5"):
        return make_batch(kind, rows, VOCAB, length)
    made = make_batch("uneven", rows, VOCAB, length)
    index = np.arange(length)
    if kind == "first part":  # of eight: the others have nothing that counts
        counts = np.broadcast_to(index < length // 8, (rows, length))
    elif kind == "two tokens":  # the first row has these, at its ends, and no other
        counts = np.broadcast_to(np.arange(rows)[:, None] > 0, (rows, length)).copy()
        counts[0, [1, -1]] = True
    else:
        document = np.minimum(np.digitize(index, [5, 11, 16]), 3)
        starts = np.asarray([0, 5, 11, 16])[document]
        made["segments"] = np.broadcast_to(np.where(document < 3, document + 1, 0), (rows, length)).astype(np.int32)
        made["positions"] = np.broadcast_to(index - starts, (rows, length)).astype(np.int32)
        counts = made["segments"] > 0
    return made | {"weights": (counts * (0.5 + made["weights"])).astype(np.float32)}
