"""Several kinds of data in one run, in shares of the rows that are exact."""

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import grain
import numpy as np

from jaxpar.data.dataset import Dataset, EvaluationSet, Share
from jaxpar.data.declared import refuse
from jaxpar.data.rows import Batch, Rows, empty_batch
from jaxpar.errors import DataError


@dataclass(frozen=True)
class MixtureData:
    """Rows of other kinds of data, mixed by weight. Raises ConfigError, with every impossible value at once.

    The share of a part in the rows is its weight over the sum of weights: exactly, whenever all of them are whole
    numbers of rows, and within `len(parts)` rows at any time. A part whose rows are used up begins again, in another
    order, whatever the others do. The parts' own `rows` are not used.
    """

    parts: dict[str, Any]  # configs such as TextData, by name
    weights: dict[str, float]  # of rows, by the same names; above 0, of any sum
    rows: int  # rows of a step, over all processes and parts
    seed: int = 0  # of the order of the rows; a part's own seed is that of its split

    def __post_init__(self) -> None:
        refuse("mixture", self, self._wrong())

    def _wrong(self) -> list[tuple[str, str]]:
        found = []
        if not self.parts:
            found.append(("parts", "at least one"))
        if set(self.parts) != set(self.weights) or not all(0 < w < math.inf for w in self.weights.values()):
            found.append(("weights", f"a number above 0 for each of the parts {', '.join(self.parts)} and no other"))
        return found

    def build(self, process_index: int = 0, process_count: int = 1) -> Dataset:
        """Builds every part. Raises DataError for what a part refuses, and for parts that do not fit together."""
        parts = {n: replace(part, rows=self.rows).build(process_index, process_count) for n, part in self.parts.items()}
        _check_equal("row_length", {name: part.train_rows.row_length for name, part in parts.items()})
        _check_equal("vocab_size", {name: part.vocab_size for name, part in parts.items()})
        weights = whole_numbers([self.weights[name] for name in parts])
        return Dataset(
            MixedRows(tuple(part.train_rows for part in parts.values()), weights),
            dict(_evaluation_sets(parts)),
            Share(self.rows, process_index, process_count),
            self.seed,
            next(iter(parts.values())).vocab_size,
            "\n".join(
                f"{name}: {weight / sum(weights):.4%} of the rows\n{_indent(part.describe())}"
                for (name, part), weight in zip(parts.items(), weights, strict=True)
            ),
        )


@dataclass(frozen=True, eq=False)
class MixedRows(Rows):
    """The rows of all parts, numbered one part after another; the order follows the weights."""

    parts: tuple[Rows, ...]
    weights: tuple[int, ...]

    @property
    def row_length(self) -> int:  # type: ignore[override]
        """Positions of a row, in every part."""
        return self.parts[0].row_length

    @cached_property
    def fingerprint(self) -> str:
        """Of the parts and their weights."""
        known = ",".join(f"{part.fingerprint}:{w}" for part, w in zip(self.parts, self.weights, strict=True))
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """See `Rows.batch`."""
        numbers = np.asarray(rows, np.int64)
        part_of = np.searchsorted(self._ends, numbers, side="right")
        batch = empty_batch(len(numbers), self.row_length)
        for index in np.unique(part_of):
            here = part_of == index
            part = self.parts[index]
            for name, array in part.batch(numbers[here] - (self._ends[index] - len(part))).items():
                batch[name][here] = array
        return batch

    def order(self, seed: int) -> grain.MapDataset:
        """Row numbers for ever: each part's in an order of its own, taken by `turn`."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts)).tolist()
        orders = [part.order(its) for part, its in zip(self.parts, seeds, strict=True)]
        first = [int(end) - len(part) for end, part in zip(self._ends, self.parts, strict=True)]

        def number(index: int) -> int:
            part, count = turn(index, self.weights)
            return first[part] + orders[part][count]

        return grain.MapDataset.range(sys.maxsize).map(number)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part) for part in self.parts])


def turn(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Which part row `index` of a mixture comes from, and how many rows of that part came before it.

    Of any n rows that the parts from some one on share, that part gets n * weight / (sum of their weights), rounded
    up, and the rest go on to those after it. Whole numbers keep this exact however long the run is.
    """
    left = sum(weights)
    for part, weight in enumerate(weights[:-1]):
        before, after = -(-index * weight // left), -(-(index + 1) * weight // left)
        if after > before:
            return part, before
        index, left = index - before, left - weight
    return len(weights) - 1, index


def whole_numbers(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportion: (0.7, 0.3) as it is written gives (7, 3)."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * common) for fraction in fractions]
    return tuple(number // math.gcd(*numbers) for number in numbers)


def _evaluation_sets(parts: Mapping[str, Dataset]) -> list[tuple[str, EvaluationSet]]:
    """Under the part's name where it has one set, under `part/set` where it has several."""
    return [
        (name if len(part.evaluations()) == 1 else f"{name}/{key}", found)
        for name, part in parts.items()
        for key, found in part.evaluations().items()
    ]


def _check_equal(what: str, found: Mapping[str, int]) -> None:
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} has {value}" for name, value in found.items())
        raise DataError(f"the parts of a mixture need the same {what}, found: {shown}; make them equal")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
