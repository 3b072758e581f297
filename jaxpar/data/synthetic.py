"""Rows made of random ids: for benchmarks, and for what a model can learn in a minute."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxpar.data.dataset import Dataset, EvaluationSet, Share
from jaxpar.data.declared import refuse
from jaxpar.data.rows import Batch, Rows, empty_batch

Task = Literal["uniform", "copy"]


@dataclass(frozen=True)
class SyntheticData:
    """Rows that are computed, not stored. Raises ConfigError, with every impossible value at once.

    `uniform`: every id drawn apart; the loss of any model is at least log(vocab_size). `copy`: half a row of ids,
    the separator `vocab_size - 1`, and the same ids again; only these have weight 1, so that the loss can go to 0.
    """

    vocab_size: int
    row_length: int  # positions of a row
    rows: int  # rows of a step, over all processes
    task: Task = "uniform"
    train_rows: int = 2**20  # an epoch; held-out rows are others
    eval_rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        refuse("synthetic data", self, self._wrong())

    def _wrong(self) -> list[tuple[str, str]]:
        found = []
        if self.task not in get_args(Task):
            found.append(("task", f"one of {', '.join(get_args(Task))}"))
        if self.vocab_size < 2:
            found.append(("vocab_size", "at least 2"))
        if self.task == "copy" and self.row_length == 1:
            found.append(("row_length", "at least 2 for task='copy'"))
        return found

    def build(self, process_index: int = 0, process_count: int = 1) -> Dataset:
        """Raises DataError for rows that the processes cannot share evenly."""
        share = Share(self.rows, process_index, process_count)
        return Dataset(
            SyntheticRows(self, 0, self.train_rows),
            {"held_out": EvaluationSet(SyntheticRows(self, self.train_rows, self.eval_rows), share)},
            share,
            self.seed,
            self.vocab_size,
            f"{self.task} ids below {self.vocab_size:,}: {self.train_rows:,} rows of {self.row_length:,} an epoch, "
            f"{self.eval_rows:,} others evaluated",
        )


@dataclass(frozen=True, eq=False)
class SyntheticRows(Rows):
    """Rows `first` to `first + count` of an endless table that the config describes."""

    config: SyntheticData
    first: int
    count: int

    @property
    def row_length(self) -> int:  # type: ignore[override]
        """Positions of a row."""
        return self.config.row_length

    @property
    def fingerprint(self) -> str:
        """Of what the ids are computed from."""
        c = self.config
        known = f"{c.task} {c.vocab_size} {c.row_length} {c.seed} {self.first} {self.count}"
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """See `Rows.batch`."""
        numbers = np.asarray(rows, np.int64).astype(np.uint64) + np.uint64(self.first)
        ids = self._copied(numbers) if self.config.task == "copy" else self._uniform(numbers, self.row_length + 1)
        used = ids.shape[1] - 1
        batch = empty_batch(len(numbers), self.row_length)
        batch["tokens"][:, :used] = ids[:, :-1]
        batch["targets"][:, :used] = ids[:, 1:]
        batch["positions"][:, :used] = np.arange(used)
        batch["segments"][:, :used] = 1
        batch["weights"][:, used // 2 if self.config.task == "copy" else 0 : used] = 1
        return batch

    def _uniform(self, numbers: np.ndarray, length: int, below: int | None = None) -> np.ndarray:
        below = below or self.config.vocab_size
        keys = mix(numbers ^ mix(np.array([self.config.seed], np.uint64)))
        bits = mix(keys[:, None] + np.arange(length, dtype=np.uint64)[None])
        return (bits >> np.uint64(11)) % np.uint64(below)

    def _copied(self, numbers: np.ndarray) -> np.ndarray:
        last = self.config.vocab_size - 1
        half = self._uniform(numbers, self.row_length // 2, last)
        return np.concatenate([half, np.full((len(half), 1), last, np.uint64), half], axis=1)


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64 of random bits, the same everywhere: SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
