"""The parity table as values: which models, batches and plans are held against one device."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import optax

from jaxpar import Plan, Program
from models.llama import LlamaConfig

TOY = LlamaConfig(vocab_size=64, num_layers=8, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)
LENGTH = 32

# name -> the model, and which weights its batch has. Cases of one model share every compiled program.
CASES: dict[str, tuple[LlamaConfig, str]] = {
    "untied": (TOY, "ones"),
    "uneven weights": (TOY, "uneven"),
    "one valid token": (TOY, "one token"),
    "masked shard": (TOY, "masked"),
    "vocab 61": (replace(TOY, vocab_size=61), "uneven"),
    "embed 36": (replace(TOY, embed_dim=36), "uneven"),
    "tied": (replace(TOY, tie_embeddings=True), "uneven"),
    "packed": (TOY, "packed"),
}

# mesh, kv heads; one kv head on eight devices is multi-query attention with replicated heads.
MESHES = (("data=8", 4), ("data=4,tensor=2", 4), ("data=2,tensor=4", 4), ("tensor=8", 4), ("tensor=8", 1))
ZERO = (0, 1, 2, 3)
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    case: str
    mesh: str
    kv_heads: int
    zero: int
    microbatches: int
    layers: int = TOY.num_layers

    def __str__(self) -> str:
        return (
            f"{self.case} on {self.mesh}, {self.kv_heads} kv heads, zero {self.zero}, {self.microbatches} microbatches"
        )

    @property
    def config(self) -> LlamaConfig:
        return replace(CASES[self.case][0], num_kv_heads=self.kv_heads, num_layers=self.layers)

    @property
    def weights(self) -> str:
        return CASES[self.case][1]

    @property
    def plan(self) -> Plan:
        return Plan(self.mesh, zero=self.zero, microbatches=self.microbatches)

    @property
    def program(self) -> Program:
        return Program(self.config.build, optax.sgd(0.1), self.plan)

    @property
    def rows(self) -> int:
        """16, or as many as the plan needs to give every device one row of every microbatch."""
        return max(16, self.plan.shape.data * self.microbatches)

    def batch(self) -> dict[str, np.ndarray]:
        return make_batch(self.weights, self.rows, self.config.vocab_size)


def cells() -> Iterator[Cell]:
    """The whole table."""
    for (mesh, kv_heads), case, zero, microbatches in itertools.product(MESHES, CASES, ZERO, MICROBATCHES):
        yield Cell(case, mesh, kv_heads, zero, microbatches)


def make_batch(kind: str, rows: int, vocab_size: int, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens with the weights named `kind`; `packed` adds segments and positions."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, length + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if kind == "packed":
        batch |= _documents(rows, length, rng)
    weights = _weights(kind, rows, length, rng)
    if kind == "packed":
        weights = weights * (batch["segments"] > 0)
    return batch | {"weights": weights.astype(np.float32)}


def _weights(kind: str, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "one token":
        return np.arange(rows * length).reshape(rows, length) == 5
    if kind == "masked":
        # Half of the rows: whole shards of every mesh with data, whole microbatches of the others.
        return np.broadcast_to(np.arange(rows)[:, None] >= rows // 2, (rows, length))
    if kind == "uneven":
        # Later rows have more valid tokens, of unequal weight.
        valid = rng.random((rows, length)) < np.arange(1, rows + 1)[:, None] / rows
        return valid * rng.uniform(0.5, 2.0, (rows, length))
    return np.ones((rows, length))


def _documents(rows: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Three documents and some padding a row, cut at random."""
    cuts = np.sort(np.stack([rng.choice(np.arange(1, length), 3, replace=False) for _ in range(rows)]), axis=1)
    index = np.arange(length)
    document = (index[None, :, None] >= cuts[:, None, :]).sum(-1)
    starts = np.take_along_axis(np.concatenate([np.zeros((rows, 1), int), cuts], axis=1), document, axis=1)
    return {
        "segments": np.where(document < 3, document + 1, 0).astype(np.int32),
        "positions": (index - starts).astype(np.int32),
    }
