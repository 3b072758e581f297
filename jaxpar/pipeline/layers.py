"""Which layers of a stack lie on which stage: every layer exactly once, whatever their number."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpar.errors import PlanError


@dataclass(frozen=True)
class StageLayers:
    """The layers of one stack, cut into consecutive parts, one for each `(stage, chunk)`.

    Stored as `[chunk, stage, layer]`; parts shorter than the longest are padded there, and the padding is not played.

    Attributes:
      route: `(stage, chunk)` in the order of the layers, see `Schedule.route`.
      counts: layers of each part, in the same order.
    """

    route: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]

    @property
    def stages(self) -> int:
        return 1 + max(stage for stage, _ in self.route)

    @property
    def chunks(self) -> int:
        return len(self.route) // self.stages

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def even(self) -> bool:
        return min(self.counts) == self.longest

    @cached_property
    def places(self) -> tuple[int, ...]:
        """By layer in depth order: its place in the flattened `[chunk, stage, layer]`."""
        return tuple(
            (chunk * self.stages + stage) * self.longest + i
            for (stage, chunk), count in zip(self.route, self.counts, strict=True)
            for i in range(count)
        )

    @property
    def in_order(self) -> bool:
        """Whether storage order is depth order, without padding."""
        return self.places == tuple(range(len(self.route) * self.longest))

    @cached_property
    def stored_depths(self) -> np.ndarray:
        """int32[chunk, stage, layer]: the depth of the layer that lies there; -1 where it is padding."""
        found = np.full((self.chunks, self.stages, self.longest), -1, np.int32)
        found.reshape(-1)[list(self.places)] = np.arange(len(self.places))
        return found

    def depths(self, stage: int) -> list[list[int]]:
        """`stored_depths` of one stage."""
        return self.stored_depths[:, stage].tolist()


def route(stages: int, chunks: int, folded: bool) -> tuple[tuple[int, int], ...]:
    """`(stage, chunk)` in the order of the layers; `folded`: odd chunks run from the last stage back to the first."""
    return tuple(
        (stages - 1 - s if folded and chunk % 2 else s, chunk) for chunk in range(chunks) for s in range(stages)
    )


def balanced(layers: int, parts: int) -> tuple[int, ...]:
    """As even as whole layers go, the longer parts first: 30 on 4 is 8, 8, 7, 7."""
    return tuple(layers // parts + (i < layers % parts) for i in range(parts))


def stage_layers(
    name: str, layers: int, route: tuple[tuple[int, int], ...], counts: Sequence[int] | None = None
) -> StageLayers:
    """The cut of a stack of `layers`. `counts`: by part in the order of the layers; None: balanced.

    Raises `PlanError` if a part would have no layer, or if `counts` are not the stack's layers.
    """
    parts = len(route)
    if layers < parts:
        raise PlanError(
            f"{name!r} has {layers} layers for {parts} stages (pipe x virtual stages); every stage needs one: "
            f"choose at most {layers}"
        )
    if counts is None:
        return StageLayers(route, balanced(layers, parts))
    if len(counts) != parts or sum(counts) != layers or min(counts) < 1:
        raise PlanError(
            f"stage_layers={tuple(counts)}: {name!r} needs {parts} numbers from 1 on that add up to its {layers} "
            f"layers, e.g. {balanced(layers, parts)}"
        )
    return StageLayers(route, tuple(counts))
