"""Layers of unequal cost on the stages of a pipeline, cut by dynamic programming so that the slowest part is fastest.

The layers of one stack compute the same, and `Plan.stage_layers=None` cuts them evenly, which is the best. This is for
costs that someone measured, or knows: `Plan(..., stage_layers=stage_layers(costs, stages))`.
"""

from collections.abc import Sequence
from itertools import accumulate

from jaxpar.errors import PlanError


def stage_layers(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """How many layers each of `parts` consecutive parts has, at least one, so that the largest cost of a part is
    smallest; of several such cuts one with the fewest layers in its longest part, which all stages store.

    `costs`: of each layer in depth order, in any unit. `parts`: stages x virtual stages. Raises `PlanError`.
    """
    layers = len(costs)
    if not 1 <= parts <= layers:
        raise PlanError(f"{layers} layers do not make {parts} parts with a layer each; choose 1 to {layers} parts")
    if min(costs) < 0:
        raise PlanError(f"costs of layers are 0 or more, found {min(costs)}")
    before = [0.0, *accumulate(costs)]
    # (largest cost of a part, layers of the longest part) of the first n layers in k parts, and the last part's layers.
    best: list[tuple[tuple[float, int], int]] = [((before[n], n), n) for n in range(layers + 1)]
    lasts = []
    for k in range(2, parts + 1):
        best = [_extended(best, before, n, k) if n >= k else ((float("inf"), 0), 0) for n in range(layers + 1)]
        lasts.append([last for _, last in best])
    counts, left = [], layers
    for last in reversed(lasts):
        counts.append(last[left])
        left -= last[left]
    return (left, *reversed(counts))


def _extended(
    best: Sequence[tuple[tuple[float, int], int]], before: Sequence[float], n: int, k: int
) -> tuple[tuple[float, int], int]:
    """The best cut of the first n layers in k parts, from those in k - 1 parts."""
    return min(
        ((max(best[n - m][0][0], before[n] - before[n - m]), max(best[n - m][0][1], m)), m) for m in range(1, n - k + 2)
    )
