"""What every dataset comes down to: numbered rows, and the order in which an endless run takes them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import grain
import numpy as np

Batch = dict[str, np.ndarray]


class Rows(ABC):
    """Rows 0..len - 1 of one length, assembled when they are asked for."""

    row_length: int  # positions of a row

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal if and only if the rows are equal, and come in the same order for the same seed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """The given rows: tokens, targets, positions, segments int32, weights float32: [rows, row_length]."""

    def __getitem__(self, row: int) -> Batch:
        """Row `row`: arrays [row_length], as in `batch`."""
        return {name: array[0] for name, array in self.batch([row]).items()}

    def order(self, seed: int) -> grain.MapDataset:
        """Row numbers for ever: every row once an epoch, in another order each. `seed`: below 2**32."""
        return grain.MapDataset.range(len(self)).seed(seed).shuffle().repeat()


def empty_batch(rows: int, row_length: int) -> Batch:
    """Padding alone: zeros of the shapes and dtypes of `Rows.batch`."""
    batch = {name: np.zeros((rows, row_length), np.int32) for name in ("tokens", "targets", "positions", "segments")}
    return batch | {"weights": np.zeros((rows, row_length), np.float32)}
