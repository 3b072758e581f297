"""Text for training and for evaluation, byte by byte."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.data.corpus import SUFFIXES, Document, limit, read_documents, split
from jaxpar.data.dataset import Dataset, EvaluationSet, Share, describe_sides
from jaxpar.data.declared import refuse, wrong_files
from jaxpar.data.packing import PackedRows, pack
from jaxpar.data.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class TextData:
    """Byte-level text out of files, held in memory. Raises ConfigError, with every impossible value at once."""

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
        refuse("text data", self, wrong_files(self))

    def build(self, process_index: int = 0, process_count: int = 1) -> Dataset:
        """Reads, splits and packs, alike on every process.

        Raises DataError for rows that the processes cannot share evenly, and for what `read_documents`,
        `limit`, `split` and `pack` refuse.
        """
        share = Share(self.rows, process_index, process_count)
        read = read_documents(self.paths, self.suffixes, self.exclude)
        documents = [document for document in read if document.data]
        left_out = [f"{len(read) - len(documents):,} empty documents"] if len(read) > len(documents) else []
        if self.limit_bytes is not None:
            documents, left = limit(documents, self.limit_bytes, self.seed)
            left_out.append(f"{size_of(left)} by limit_bytes={self.limit_bytes:,}")
        train, held_out = split(documents, self.held_out, self.seed)
        train_rows = self._pack(train)
        # A document's bytes and its end are as many pairs as it has bytes.
        evaluation = EvaluationSet(self._pack(held_out), share, self.eval_rows, bytes_per_target=1.0)
        return Dataset(
            train_rows,
            {"held_out": evaluation},
            share,
            self.seed,
            ByteTokenizer.vocab_size,
            describe_sides((size_of(train), train_rows), (size_of(held_out), evaluation), self.rows, left_out),
        )

    def _pack(self, documents: Sequence[Document]) -> PackedRows:
        tokenizer = ByteTokenizer()
        contents = (_shuffled(doc, self.seed) if self.shuffle_bytes else doc.data for doc in documents)
        # The end of a document is a target like any other, so n bytes are n pairs and take n slots.
        ended = [np.append(tokenizer.encode(data), np.int32(tokenizer.end_of_document)) for data in contents]
        return pack(ended, self.row_length)


def size_of(documents: Sequence[Document]) -> str:
    """Their number and bytes, in words."""
    return f"{len(documents):,} documents of {sum(len(document.data) for document in documents):,} bytes"


def _shuffled(document: Document, seed: int) -> bytes:
    # Seeded by the name, so that a document is shuffled alike whatever else is in the corpus.
    name = hashlib.blake2b(document.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    generator = np.random.default_rng([seed, int.from_bytes(name)])
    return generator.permutation(np.frombuffer(document.data, np.uint8)).tobytes()
