"""Token ids that `jaxpar tokenize` has written, mapped from disk: for corpora larger than memory."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from jaxpar.data.dataset import Dataset, EvaluationSet, Share, describe_sides
from jaxpar.data.declared import refuse
from jaxpar.data.packing import PackedRows, pack_stream
from jaxpar.data.shards import Index, TokenFiles, load_index
from jaxpar.data.synthetic import mix
from jaxpar.errors import DataError


@dataclass(frozen=True)
class TokenData:
    """A folder of shards. Raises ConfigError, with every impossible value at once.

    In memory are some 60 bytes for each document and 20 for each piece of a row; tokens are read when their row is.
    Documents are packed as `packing` says, each into one of the 64 rows that are open when it comes. A document's
    side depends on its text, the fraction and the seed, so that equal documents are on the same one.
    """

    directory: str  # with an index.json
    row_length: int  # positions of a row
    rows: int  # rows of a step, over all processes
    held_out: float = 0.01  # fraction of the documents
    seed: int = 0  # of the split and the order of rows
    eval_rows: int | None = None  # evaluate on so many held-out rows, spread evenly over all of them

    def __post_init__(self) -> None:
        refuse("token data", self)

    def build(self, process_index: int = 0, process_count: int = 1) -> Dataset:
        """Raises DataError for rows that the processes cannot share evenly, a folder that is not whole, and a corpus
        that cannot be split or has no pair of tokens."""
        share = Share(self.rows, process_index, process_count)
        index = load_index(self.directory)
        documents = index.documents()
        out = held_out(documents["hash"], self.held_out, self.seed)
        sides = [np.flatnonzero(~out), np.flatnonzero(out)]
        train, evaluated = (self._pack(index, documents, side) for side in sides)
        sizes = [_size(documents[side]) for side in sides]
        bytes_per_target = float(documents["bytes"][sides[1]].sum() / evaluated.num_targets)
        evaluation = EvaluationSet(evaluated, share, self.eval_rows, bytes_per_target)
        empty = sum(shard.empty for shard in index.shards)
        left_out = [f"{empty:,} empty documents"] if empty else []
        return Dataset(
            train,
            {"held_out": evaluation},
            share,
            self.seed,
            index.vocab_size,
            describe_sides((sizes[0], train), (sizes[1], evaluation), self.rows, left_out),
        )

    def _pack(self, index: Index, documents: np.ndarray, side: np.ndarray) -> PackedRows:
        ends = documents["end"]
        firsts = np.concatenate([[0], ends[:-1]])
        known = json.dumps([shard.checksum for shard in index.shards]).encode()
        content = hashlib.blake2b(known, digest_size=16).digest()
        return pack_stream(TokenFiles(index), firsts[side], (ends - firsts)[side], self.row_length, content=content)


def held_out(hashes: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool [documents], from uint64 hashes of their texts; neither side is empty.

    Raises DataError when all documents are one and the same, or there is none.
    """
    places = mix(hashes ^ mix(np.array([seed], np.uint64)))
    if len(places) == 0 or places.min() == places.max():
        raise DataError(
            f"{len(places)} documents with fewer than 2 different texts cannot be split into a training and a held-out "
            "side; add documents"
        )
    out = places < np.uint64(int(fraction * 2**64))
    if not out.any():
        out = places == places.min()
    if out.all():
        out = places != places.max()
    return out


def _size(documents: np.ndarray) -> str:
    return f"{len(documents):,} documents of {int(documents['bytes'].sum()):,} bytes"
