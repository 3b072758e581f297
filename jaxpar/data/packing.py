"""Documents of any length in rows of one length.

A document of n tokens is n - 1 pairs (token, next token); a row has room for `row_length` pairs. The rule:

- Every pair of every document stands in exactly one slot, with weight 1; its target is the next token of the
  same document. So every token but a document's first is a target exactly once, and no pair crosses a border.
- A document with more than `row_length` pairs is cut between pairs into pieces. The last target of a piece is
  the first token of the next one: pieces overlap by that one token, so no target is lost.
- Full pieces take a row of their own. Shorter ones (and short documents, never cut) go, as they come, into
  the open row that they fill best, or open a new one; of more than `OPEN_ROWS` open rows the fullest closes.
- Segments count the pieces of a row from 1, positions count the pairs of a piece from 0 (a piece cannot
  attend to the one before it, which stands in another row). Slots left over are padding: everything is 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpar.errors import DataError

OPEN_ROWS = 64  # documents of random lengths up to a row then leave 2 % padding, with 16 rows 4 %


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows, assembled when they are asked for; in memory are the tokens and a table of pieces."""

    row_length: int
    stream: np.ndarray  # unsigned int [tokens]: all documents one after another
    starts: np.ndarray  # int64 [pieces]: a piece's first token in the stream; pieces are sorted by row
    lengths: np.ndarray  # int64 [pieces]: its pairs
    first_piece: np.ndarray  # int64 [rows + 1]: row i holds the pieces first_piece[i]:first_piece[i + 1]

    def __len__(self) -> int:
        return len(self.first_piece) - 1

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Row `row`: arrays [row_length], as in `batch`."""
        return {name: array[0] for name, array in self.batch([row]).items()}

    def batch(self, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The given rows: tokens, targets, positions, segments int32, weights float32: [rows, row_length]."""
        shape = (len(rows), self.row_length)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")}
        batch["weights"] = np.zeros(shape, np.float32)
        for index, row in enumerate(rows):
            self._fill({name: array[index] for name, array in batch.items()}, int(row))
        return batch

    def _fill(self, into: dict[str, np.ndarray], row: int) -> None:
        column = 0
        pieces = range(self.first_piece[row], self.first_piece[row + 1])
        for segment, piece in enumerate(pieces, start=1):
            start, length = self.starts[piece], self.lengths[piece]
            slots = slice(column, column + length)
            into["tokens"][slots] = self.stream[start : start + length]
            into["targets"][slots] = self.stream[start + 1 : start + length + 1]
            into["positions"][slots] = np.arange(length)
            into["segments"][slots] = segment
            into["weights"][slots] = 1
            column += length

    @property
    def num_targets(self) -> int:
        """Slots of weight 1 in all rows."""
        return int(self.lengths.sum())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything the rows are made of: equal if and only if the rows are equal."""
        digest = hashlib.blake2b(f"{self.row_length} {self.stream.dtype.str}".encode(), digest_size=16)
        for array in (self.stream, self.starts, self.lengths, self.first_piece):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def pack(documents: Sequence[np.ndarray], row_length: int) -> PackedRows:
    """Packs documents (non-negative int [tokens] each) into rows of `row_length` pairs, by the rule above.

    Raises DataError when no document has two tokens, so that there is no pair at all.
    """
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    if not (lengths > 1).any():
        raise DataError(
            f"{len(documents)} documents hold no pair of tokens to learn from: at least one needs 2 tokens "
            "or more; add text"
        )
    # Two bytes a token are enough for most vocabularies; a row becomes int32 when it is assembled.
    smallest = np.min_scalar_type(max(int(document.max()) for document in documents if len(document)))
    stream = np.concatenate([document.astype(smallest) for document in documents])
    rows, starts, sizes = map(np.array, _place(lengths.tolist(), row_length))
    order = np.argsort(rows, kind="stable")  # stable: within a row the pieces stay in the order they came
    first_piece = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return PackedRows(row_length, stream, starts[order], sizes[order], first_piece)


def _place(lengths: list[int], row_length: int) -> tuple[list[int], list[int], list[int]]:
    """For every piece its row, its first token in the stream, and its number of pairs."""
    rows, starts, sizes = [], [], []
    room: dict[int, int] = {}  # open row -> free slots
    count = first_token = 0
    for length in lengths:
        for offset in range(0, length - 1, row_length):
            size = min(row_length, length - 1 - offset)
            row = min((row for row, free in room.items() if free >= size), key=room.__getitem__, default=count)
            count = max(count, row + 1)
            room[row] = room.get(row, row_length) - size
            if room[row] == 0:
                del room[row]
            elif len(room) > OPEN_ROWS:
                del room[min(room, key=room.__getitem__)]
            rows.append(row)
            starts.append(first_token + offset)
            sizes.append(size)
        first_token += length
    return rows, starts, sizes
