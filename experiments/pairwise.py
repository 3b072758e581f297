"""A small set of combinations in which every two values of different factors meet."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Greedy: each row is the combination that meets most pairs not yet met; the first among equals.

    `allowed`: which combinations there are; every pair that is in one of them is met.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    rows = [row for row in rows if allowed(row)]
    numbers: dict[Pair, int] = {}
    # A row's pairs as the bits of one number: a table of ten thousand rows is covered in a second.
    bits = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(row)) for row in rows]
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(rows)), key=lambda i: (missing & bits[i]).bit_count())
        chosen.append(rows[best])
        missing &= ~bits[best]
    return chosen


def pairs(row: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))
