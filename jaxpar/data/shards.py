"""Token ids on disk: shards of whole documents, and an index that says what they are.

A folder holds `index.json` and, for each shard, `<name>.tokens` (ids one after another, uint16 where the vocabulary
fits, else uint32, little-endian), `<name>.documents` (`DOCUMENT` records) and `<name>.json` (`ShardInfo`). Each
file is written under another name, put safely on the disk and then renamed; a shard's `.json` comes last, and the
index after all shards. So whatever has its name is whole.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np

from jaxpar.data.tokenizer import Tokenizer
from jaxpar.errors import DataError

INDEX = "index.json"
PARTIAL = ".partial"
FORMAT = 1

# Where a document's tokens end in its shard, the bytes of its text, and a hash of them.
DOCUMENT = np.dtype([("end", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])


@dataclass(frozen=True)
class ShardInfo:
    """One shard: how much is in it, and a checksum of it all."""

    name: str
    tokens: int
    documents: int
    bytes: int  # of text
    empty: int  # documents without text, which were left out
    checksum: str


@dataclass(frozen=True)
class Index:
    """What the ids are, and where they lie."""

    directory: Path
    tokenizer: str  # `bytes`, or the name of a file in the folder
    end: str | None  # the token that ends a document, where it was chosen
    vocab_size: int
    shards: tuple[ShardInfo, ...]

    def save(self) -> None:
        """Writes `index.json`."""
        values = {"format": FORMAT} | {k: v for k, v in asdict(self).items() if k != "directory"}
        with whole_file(self.directory / INDEX) as file:
            file.write(json.dumps(values, indent=1).encode())

    @property
    def dtype(self) -> np.dtype:
        """The smaller of uint16 and uint32 that holds every id."""
        return dtype_of(self.vocab_size)

    @property
    def tokens(self) -> int:
        """In all shards."""
        return sum(shard.tokens for shard in self.shards)

    def documents(self) -> np.ndarray:
        """`DOCUMENT` [documents] of all shards; `end` counts from the first token of the first shard."""
        tables = [np.empty(0, DOCUMENT)]
        first = 0
        for shard in self.shards:
            table = np.fromfile(self.directory / f"{shard.name}.documents", DOCUMENT)
            table["end"] += first
            first += shard.tokens
            tables.append(table)
        return np.concatenate(tables)


def load_index(directory: str | Path) -> Index:
    """Raises DataError: no index, not of this format, a shard that is missing or of another size."""
    directory = Path(directory).expanduser()
    path = directory / INDEX
    if not path.exists():
        raise DataError(f"there is no {path}: write it with `jaxpar tokenize INPUT -o {directory}`, or let that finish")
    try:
        values = json.loads(path.read_text())
        if values.pop("format") != FORMAT:
            raise ValueError(f"needed format {FORMAT}")
        shards = tuple(ShardInfo(**shard) for shard in values.pop("shards"))
        index = Index(directory, shards=shards, **values)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not what `jaxpar tokenize` writes ({error}): write it anew") from error
    for shard in shards:
        _check_size(directory / f"{shard.name}.tokens", shard.tokens * index.dtype.itemsize)
        _check_size(directory / f"{shard.name}.documents", shard.documents * DOCUMENT.itemsize)
    return index


def _check_size(file: Path, size: int) -> None:
    if not file.exists():
        raise DataError(f"{file} is missing: copy the folder again, or write it anew")
    if file.stat().st_size != size:
        found = file.stat().st_size
        raise DataError(f"{file} needs {size} bytes, found {found}: copy the folder again, or write it anew")


class TokenFiles:
    """The ids of all shards as one stream, mapped from disk. A slice must lie within a shard."""

    def __init__(self, index: Index):
        self._index = index
        self.dtype = index.dtype
        self._ends = list(accumulate(shard.tokens for shard in index.shards))
        self._maps: dict[int, np.ndarray] = {}

    def __getitem__(self, tokens: slice) -> np.ndarray:
        number = bisect_right(self._ends, tokens.start)
        first = self._ends[number - 1] if number else 0
        return self._map(number)[tokens.start - first : tokens.stop - first]

    def _map(self, number: int) -> np.ndarray:
        if number not in self._maps:
            path = self._index.directory / f"{self._index.shards[number].name}.tokens"
            # As a plain array: each slice of a np.memmap costs several times as much.
            self._maps[number] = np.asarray(np.memmap(path, self.dtype, mode="r"))
        return self._maps[number]


def read_info(directory: Path, name: str) -> ShardInfo | None:
    """The shard, if it is whole."""
    path = directory / f"{name}.json"
    return ShardInfo(**json.loads(path.read_text())) if path.exists() else None


def write_shard(directory: Path, name: str, texts: Iterable[bytes], tokenizer: Tokenizer) -> ShardInfo:
    """Writes the shard, whole or not at all; a text without a byte is counted and left out."""
    dtype, digest = dtype_of(tokenizer.vocab_size), hashlib.blake2b(digest_size=16)
    records: list[tuple[int, int, int]] = []
    tokens = empty = 0
    with whole_file(directory / f"{name}.tokens") as file:
        for text in texts:
            if not text:
                empty += 1
                continue
            ids = np.append(tokenizer.encode(text), tokenizer.end_of_document).astype(dtype).tobytes()
            digest.update(ids)
            file.write(ids)
            tokens += len(ids) // dtype.itemsize
            records.append((tokens, len(text), int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())))
    table = np.array(records, DOCUMENT)
    digest.update(table.tobytes())
    with whole_file(directory / f"{name}.documents") as file:
        file.write(table.tobytes())
    info = ShardInfo(name, tokens, len(table), int(table["bytes"].sum()), empty, digest.hexdigest())
    with whole_file(directory / f"{name}.json") as file:
        file.write(json.dumps(asdict(info)).encode())
    return info


def dtype_of(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that has its name only once it is complete and on the disk."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
