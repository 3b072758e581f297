"""The dot FLOPs of a compiled pipeline, counted where they are executed, apart for the layers and for the head."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpar.estimate import dots
from jaxpar.estimate.hlo_text import Computation, Instruction, Module, parse_module
from jaxpar.estimate.loops import trip_count
from jaxpar.pipeline import Kind
from jaxpar.pipeline.table import NONE, Table


@dataclass(frozen=True)
class Work:
    """dot FLOPs of a step on one device, the dearest branch of each condition taken in every tick."""

    layers: float
    head: float


class Executed:
    """Reads a program's text. `vocab`: the rows of the vocabulary on one device, a size that no other dim has."""

    def __init__(self, text: str, vocab: int):
        self.module: Module = parse_module(text)
        self.vocab = vocab
        self._known: dict[str, np.ndarray] = {}

    @cached_property
    def work(self) -> Work:
        layers, head = self._computation(self.module.entry)
        return Work(float(layers), float(head))

    def _computation(self, name: str) -> np.ndarray:
        """[layers, head]."""
        if name not in self._known:
            computation = self.module.computations[name]
            parts = [self._instruction(computation, at) for at in computation.instructions.values()]
            self._known[name] = np.sum(parts, axis=0) if parts else np.zeros(2)
        return self._known[name]

    def _instruction(self, computation: Computation, at: Instruction) -> np.ndarray:
        if at.opcode == "while":
            trips = trip_count(self.module, computation, at)
            inside = self._computation(at.attribute("body"))
            assert trips is not None or not inside.any(), f"loop {at.name} has no fixed trip count"
            return (trips or 0) * inside
        if at.opcode == "conditional":
            return np.max([self._computation(branch) for branch in at.branches], axis=0)
        flops = dots.flops(computation, at)
        own = np.asarray([0.0, flops] if self._of_head(computation, at) else [flops, 0.0])
        return sum((self._computation(callee) for callee in at.callees), start=own)

    def _of_head(self, computation: Computation, at: Instruction) -> bool:
        leaves = [*at.leaves, *(leaf for operand in computation.operands(at) for leaf in operand.leaves)]
        return any(self.vocab in leaf.dims for leaf in leaves)


def by_the_table(work: Work, table: Table, weight: float) -> Work:
    """`work` without the ticks in which a condition does not hold. `weight`: FLOPs of one W on one stage.

    Only W slots and the head are ever under a condition here, besides the embedding, which has no dots.
    """
    heads = table.ends.head != NONE
    in_loops = sum(s.stop - s.start for s in table.segments() if heads[s.start : s.stop].any())
    idle = 0
    for segment in table.segments():
        for i in segment.sometimes:
            assert table.schedule.slots[i].kind == Kind.W, "a forward or a backward under a condition"
            idle += int((~table.played(i)[segment.start : segment.stop]).sum())
    return Work(work.layers - idle * weight, work.head * int(heads.sum()) / in_loops)


def weight_flops(matrices: Mapping[str, tuple[int, ...]], layers: int, tokens: int) -> float:
    """Of the gradients of the layers' matrices, by name the dims of one layer's."""
    return 2.0 * tokens * layers * sum(math.prod(dims) for dims in matrices.values())
