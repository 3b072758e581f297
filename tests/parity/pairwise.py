"""A small set of combinations in which every two values of different factors meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each row is the combination that meets most pairs not yet met; the first among equals."""
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    missing = {pair for row in rows for pair in pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs(row)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(row: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))
