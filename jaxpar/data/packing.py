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
- Where only some tokens are scored (the answers of a chat), a pair has weight 1 if its target is one of them, else 0.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from jaxpar.data.rows import Batch, Rows, empty_batch
from jaxpar.errors import DataError

OPEN_ROWS = 64  # documents of random lengths up to a row then leave 2 % padding, with 16 rows 4 %


class Stream(Protocol):
    """All documents one after another: an array, or files that give an array for a slice within a document."""

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, tokens: slice, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class PackedRows(Rows):
    """Rows, assembled when they are asked for; in memory is a table of pieces, 20 bytes each, beside the stream."""

    row_length: int
    stream: Stream  # unsigned int [tokens]
    starts: np.ndarray  # int64 [pieces]: a piece's first token in the stream; pieces are sorted by row
    lengths: np.ndarray  # int64 [pieces]: its pairs
    first_piece: np.ndarray  # int64 [rows + 1]: row i holds the pieces first_piece[i]:first_piece[i + 1]
    scored: np.ndarray | None = None  # bool [tokens]: which are targets of weight 1; None: all
    content: bytes | None = None  # stands for the stream in the fingerprint, where hashing it would take long

    def __len__(self) -> int:
        return len(self.first_piece) - 1

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """See `Rows.batch`."""
        batch = empty_batch(len(rows), self.row_length)
        for index, row in enumerate(rows):
            self._fill({name: array[index] for name, array in batch.items()}, int(row))
        return batch

    def _fill(self, into: Batch, row: int) -> None:
        column = 0
        pieces = range(self.first_piece[row], self.first_piece[row + 1])
        for segment, piece in enumerate(pieces, start=1):
            start, length = int(self.starts[piece]), int(self.lengths[piece])
            slots = slice(column, column + length)
            tokens = self.stream[start : start + length + 1]
            into["tokens"][slots] = tokens[:-1]
            into["targets"][slots] = tokens[1:]
            into["positions"][slots] = np.arange(length)
            into["segments"][slots] = segment
            into["weights"][slots] = 1 if self.scored is None else self.scored[start + 1 : start + length + 1]
            column += length

    @property
    def num_pairs(self) -> int:
        """Slots that are no padding."""
        return int(self.lengths.sum())

    @cached_property
    def num_targets(self) -> int:
        """Slots of weight 1 in all rows."""
        if self.scored is None:
            return self.num_pairs
        before = np.concatenate([[0], np.cumsum(self.scored)])  # scored tokens before each
        return int((before[self.starts + self.lengths + 1] - before[self.starts + 1]).sum())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything the rows are made of."""
        digest = hashlib.blake2b(f"{self.row_length} {self.stream.dtype.str}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.stream).data if self.content is None else self.content)
        for table in (self.starts, self.lengths, self.first_piece, self.scored):
            if table is not None:
                digest.update(np.ascontiguousarray(table).data)
        return digest.hexdigest()


def pack(documents: Sequence[np.ndarray], row_length: int, scored: Sequence[np.ndarray] | None = None) -> PackedRows:
    """Packs documents (non-negative int [tokens] each) into rows of `row_length` pairs, by the rule above.

    `scored`: bool [tokens] for each document. Raises DataError when there is no pair at all.
    """
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    check_pairs(lengths)
    # Two bytes a token are enough for most vocabularies; a row becomes int32 when it is assembled.
    smallest = np.min_scalar_type(max(int(document.max()) for document in documents if len(document)))
    stream = np.concatenate([document.astype(smallest) for document in documents])
    return pack_stream(
        stream,
        np.cumsum(lengths) - lengths,
        lengths,
        row_length,
        scored=None if scored is None else np.concatenate(scored),
    )


def pack_stream(
    stream: Stream,
    first_tokens: np.ndarray,
    lengths: np.ndarray,
    row_length: int,
    *,
    scored: np.ndarray | None = None,
    content: bytes | None = None,
) -> PackedRows:
    """Packs the documents that begin at `first_tokens` in the stream and have `lengths` tokens: int64 [documents].

    Raises DataError when there is no pair at all.
    """
    check_pairs(lengths)
    rows, documents, offsets, sizes = (np.frombuffer(x, np.int64) for x in _place(lengths, row_length))
    order = np.argsort(rows, kind="stable")  # stable: within a row the pieces stay in the order they came
    first_piece = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    starts = (first_tokens[documents] + offsets)[order]
    return PackedRows(row_length, stream, starts, sizes[order], first_piece, scored, content)


def check_pairs(lengths: np.ndarray) -> None:
    """Raises DataError when no document (int [documents] tokens) has two tokens, so that there is no pair at all."""
    if not (lengths > 1).any():
        raise DataError(
            f"{len(lengths)} documents hold no pair of tokens to learn from: at least one needs 2 tokens "
            "or more; add text"
        )


def _place(lengths: np.ndarray, row_length: int) -> list[array]:
    """For every piece, int64: its row, its document, its first token in that, and its number of pairs."""
    pieces = [array("q") for _ in range(4)]  # lists of a large corpus would take five times the memory
    open_rows: list[tuple[int, int]] = []  # (free slots, row), sorted: the fullest and then the oldest first
    count = 0
    for document, length in enumerate(array("q", lengths.astype(np.int64).tobytes())):
        for offset in range(0, length - 1, row_length):
            size = min(row_length, length - 1 - offset)
            best = bisect_left(open_rows, (size, -1))
            if best < len(open_rows):
                free, row = open_rows.pop(best)
            else:
                free, row = row_length, count
                count += 1
            if free > size:
                insort(open_rows, (free - size, row))
                if len(open_rows) > OPEN_ROWS:
                    del open_rows[0]
            for column, value in zip(pieces, (row, document, offset, size), strict=True):
                column.append(value)
    return pieces
