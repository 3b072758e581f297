"""Text for training and for evaluation: what a run declares, and the dataset it becomes."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import grain
import numpy as np

from jaxpar.data.corpus import SUFFIXES, Document, bigram_entropy, limit, read_documents, split
from jaxpar.data.iterator import READ_AHEAD, Batch, RowIterator, local_rows
from jaxpar.data.packing import PackedRows, pack
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.errors import ConfigError, DataError


@dataclass(frozen=True)
class TextData:
    """Byte-level text out of files. Raises ConfigError, with every impossible value at once."""

    paths: tuple[str, ...]  # files and folders
    row_length: int  # positions of a row
    rows: int  # rows of a step, over all processes
    suffixes: tuple[str, ...] = SUFFIXES  # which files of a folder
    exclude: tuple[str, ...] = (".*",)  # glob patterns for names of files and folders to leave out
    held_out: float = 0.1  # fraction of the documents
    seed: int = 0  # of the split, the choice under limit_bytes, and the order of rows
    limit_bytes: int | None = None  # use whole documents of at most so many bytes together
    eval_rows: int | None = None  # evaluate on so many held-out rows, spread evenly over all of them
    shuffle_bytes: bool = False  # a control: each document's bytes in random order, same bytes, no structure

    def __post_init__(self) -> None:
        problems = [f"{name} must be {need}, found {getattr(self, name)!r}" for name, need in self._wrong()]
        if problems:
            raise ConfigError("text data: " + "; ".join(problems))

    def _wrong(self) -> Iterable[tuple[str, str]]:
        if isinstance(self.paths, str) or not self.paths:
            yield "paths", "a tuple of at least one path"
        if isinstance(self.suffixes, str) or not all(suffix.startswith(".") for suffix in self.suffixes):
            yield "suffixes", "a tuple of suffixes that begin with a dot"
        if isinstance(self.exclude, str):
            yield "exclude", "a tuple of patterns"
        for name in ("rows", "row_length"):
            if getattr(self, name) < 1:
                yield name, "at least 1"
        for name in ("limit_bytes", "eval_rows"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                yield name, "at least 1, or None for all"
        if not 0 < self.held_out < 1:
            yield "held_out", "a fraction between 0 and 1, both excluded"
        if not 0 <= self.seed < 2**32:
            yield "seed", "from 0 to 2**32 - 1"

    def build(self, process_index: int = 0, process_count: int = 1) -> "TextDataset":
        """Reads, splits and packs, alike on every process.

        Raises DataError for rows that the processes cannot share evenly, and for what `read_documents`,
        `limit`, `split` and `pack` refuse.
        """
        self._check_processes(process_index, process_count)
        read = read_documents(self.paths, self.suffixes, self.exclude)
        documents = [document for document in read if document.data]
        left_out = [f"{len(read) - len(documents):,} empty documents"] if len(read) > len(documents) else []
        if self.limit_bytes is not None:
            documents, left = limit(documents, self.limit_bytes, self.seed)
            left_out.append(f"{_size(left)} by limit_bytes={self.limit_bytes:,}")
        sides = split(documents, self.held_out, self.seed)
        return TextDataset(
            config=self,
            train_rows=self._pack(sides[0]),
            held_out_rows=self._pack(sides[1]),
            sizes=(_size(sides[0]), _size(sides[1])),
            left_out=tuple(left_out),
            process_index=process_index,
            process_count=process_count,
        )

    def _check_processes(self, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise DataError(f"process_index must be from 0 to process_count - 1 = {count - 1}, found {index}")
        if self.rows % count:
            raise DataError(
                f"rows={self.rows} cannot be shared by {count} processes: {self.rows} / {count} is no whole "
                f"number; use a multiple of {count}, such as {-(-self.rows // count) * count}"
            )

    def _pack(self, documents: Sequence[Document]) -> PackedRows:
        tokenizer = ByteTokenizer()
        contents = (_shuffled(doc, self.seed) if self.shuffle_bytes else doc.data for doc in documents)
        # The end of a document is a target like any other, so n bytes are n pairs and take n slots.
        ended = [np.append(tokenizer.encode(data), np.int32(tokenizer.end_of_document)) for data in contents]
        return pack(ended, self.row_length)


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Rows for training and held-out rows, for one process of several. Made by `TextData.build`.

    A batch is `tokens`, `targets`, `positions`, `segments` int32 and `weights` float32, all [local rows,
    row_length]. Process i of n takes the rows i * rows / n to (i + 1) * rows / n of each batch, in training
    and in evaluation, so that the processes' batches one after another are the batch of a single process.
    """

    vocab_size: ClassVar[int] = ByteTokenizer.vocab_size
    config: TextData
    train_rows: PackedRows
    held_out_rows: PackedRows
    sizes: tuple[str, str]  # documents and bytes of the two sides, in words
    left_out: tuple[str, ...]  # what of the corpus is on neither side, and why
    process_index: int
    process_count: int

    def train(self) -> RowIterator:
        """A new endless iterator, at the first row of the first epoch."""
        config = self.config
        return RowIterator(self.train_rows, batch_rows=config.rows, local=self._local, seed=config.seed)

    def evaluation(self) -> Iterable[Batch]:
        """Every held-out row (or the `eval_rows` chosen) once, in order; can be iterated again.

        Every process gets the same number of batches. The last has the rows that are left, so a process late
        in the order may get fewer rows there than others, or none ([0, row_length]).
        """
        return self._evaluation(self._local)

    @cached_property
    def bigram_entropy(self) -> float:
        """H(target | token) in nats per token of what the `evaluation` of all processes scores together."""
        return bigram_entropy(self._evaluation(slice(None)), self.vocab_size)

    def describe(self) -> str:
        """Documents, bytes and rows of each side, and what was left out."""
        steps = len(self.train_rows) / self.config.rows
        left_out = list(self.left_out)
        if unscored := len(self.held_out_rows) - len(self._evaluated):
            left_out.append(f"{unscored:,} held-out rows by eval_rows={self.config.eval_rows:,}")
        return (
            f"train:    {self.sizes[0]}, {_rows(self.train_rows)}, {steps:,.1f} steps an epoch\n"
            f"held out: {self.sizes[1]}, {_rows(self.held_out_rows)}, {len(self._evaluated):,} evaluated\n"
            f"left out: {', '.join(left_out) or 'nothing'}"
        )

    def _evaluation(self, local: slice) -> Iterable[Batch]:
        numbers = grain.MapDataset.source(self._evaluated).batch(self.config.rows)
        return numbers.map(local_rows(self.held_out_rows, local)).to_iter_dataset(READ_AHEAD)

    @cached_property
    def _evaluated(self) -> np.ndarray:
        total = len(self.held_out_rows)
        count = min(total, self.config.eval_rows or total)
        return np.arange(count) * total // count  # spread: the first rows would be the first files alone

    @property
    def _local(self) -> slice:
        share = self.config.rows // self.process_count
        return slice(self.process_index * share, (self.process_index + 1) * share)


def _shuffled(document: Document, seed: int) -> bytes:
    # Seeded by the name, so that a document is shuffled alike whatever else is in the corpus.
    name = hashlib.blake2b(document.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    generator = np.random.default_rng([seed, int.from_bytes(name)])
    return generator.permutation(np.frombuffer(document.data, np.uint8)).tobytes()


def _size(documents: Sequence[Document]) -> str:
    return f"{len(documents):,} documents of {sum(len(document.data) for document in documents):,} bytes"


def _rows(rows: PackedRows) -> str:
    padding = 1 - rows.num_targets / (len(rows) * rows.row_length)
    return f"{len(rows):,} rows of {rows.row_length:,} ({padding:.1%} padding)"
