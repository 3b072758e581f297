"""Rows for training and sets of rows for evaluation, as one process of several sees them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import grain
import numpy as np

from jaxpar.data.corpus import bigram_entropy
from jaxpar.data.iterator import READ_AHEAD, RowIterator, local_rows
from jaxpar.data.packing import PackedRows
from jaxpar.data.rows import Batch, Rows
from jaxpar.errors import DataError

# With more ids a held-out set has too few pairs for their entropy to be a bar, and the table is large.
_LARGEST_BIGRAM_TABLE = 512


@dataclass(frozen=True)
class Share:
    """The part of each batch that a process takes: rows i * rows / n to (i + 1) * rows / n for process i of n.

    So the processes' batches one after another are the batch of a single process. Raises DataError for rows that
    the processes cannot share evenly.
    """

    rows: int  # of a whole batch
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        index, count = self.process_index, self.process_count
        if not 0 <= index < count:
            raise DataError(f"process_index must be from 0 to process_count - 1 = {count - 1}, found {index}")
        if self.rows % count:
            raise DataError(
                f"rows={self.rows} cannot be shared by {count} processes: {self.rows} / {count} is no whole "
                f"number; use a multiple of {count}, such as {-(-self.rows // count) * count}"
            )

    @property
    def local(self) -> slice:
        """This process's rows of a batch."""
        share = self.rows // self.process_count
        return slice(self.process_index * share, (self.process_index + 1) * share)


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Batches that hold every row (or the `limit` chosen) once, in order; can be iterated again.

    Every process gets the same number of batches. The last has the rows that are left, so a process late in the
    order may get fewer rows there than others, or none ([0, row_length]).
    """

    rows: Rows
    share: Share
    limit: int | None = None  # so many rows, spread evenly over all of them
    bytes_per_target: float | None = None  # of the text, over all rows; None where there is no text

    @property
    def num_rows(self) -> int:
        """The rows that are evaluated, on all processes together."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.share.local)

    def whole(self) -> Iterator[Batch]:
        """The batches of all processes together."""
        return self._batches(slice(None))

    def _batches(self, local: slice) -> Iterator[Batch]:
        numbers = grain.MapDataset.source(self._numbers).batch(self.share.rows)
        return iter(numbers.map(local_rows(self.rows, local)).to_iter_dataset(READ_AHEAD))

    @cached_property
    def _numbers(self) -> np.ndarray:
        total = len(self.rows)
        count = min(total, self.limit or total)
        return np.arange(count) * total // count  # spread: the first rows would be the first files alone


@dataclass(frozen=True, eq=False)
class Dataset:
    """Made by `build(process_index, process_count)` of the config of each kind of data.

    A batch is `tokens`, `targets`, `positions`, `segments` int32 and `weights` float32, all [local rows,
    row_length], in training and in evaluation.
    """

    train_rows: Rows
    evaluation_sets: Mapping[str, EvaluationSet]
    share: Share
    seed: int  # of the order of the training rows
    vocab_size: int
    description: str

    def train(self) -> RowIterator:
        """A new endless iterator, at the first row of the first epoch."""
        return RowIterator(self.train_rows, batch_rows=self.share.rows, local=self.share.local, seed=self.seed)

    def evaluations(self) -> dict[str, EvaluationSet]:
        """The sets by name; `validation_loss` is that of the first."""
        return dict(self.evaluation_sets)

    @cached_property
    def bigram_entropy(self) -> float | None:
        """H(target | token) in nats per token of the first evaluation set; None for large vocabularies."""
        if self.vocab_size > _LARGEST_BIGRAM_TABLE:
            return None
        return bigram_entropy(next(iter(self.evaluation_sets.values())).whole(), self.vocab_size)

    def describe(self) -> str:
        """What is in it, and what was left out."""
        return self.description


def describe_sides(
    train: tuple[str, PackedRows], held_out: tuple[str, EvaluationSet], rows: int, left_out: Sequence[str]
) -> str:
    """Three lines: documents and rows of each side, and what is on neither. `rows`: of a step."""
    evaluation = held_out[1]
    left_out = list(left_out)
    if unscored := len(evaluation.rows) - evaluation.num_rows:
        left_out.append(f"{unscored:,} held-out rows by eval_rows={evaluation.limit:,}")
    steps = len(train[1]) / rows
    return (
        f"train:    {train[0]}, {_rows(train[1])}, {steps:,.1f} steps an epoch\n"
        f"held out: {held_out[0]}, {_rows(evaluation.rows)}, {evaluation.num_rows:,} evaluated\n"
        f"left out: {', '.join(left_out) or 'nothing'}"
    )


def _rows(rows: Rows) -> str:
    assert isinstance(rows, PackedRows)
    padding = 1 - rows.num_pairs / (len(rows) * rows.row_length)
    return f"{len(rows):,} rows of {rows.row_length:,} ({padding:.1%} padding)"
