"""Where text comes from: documents out of files, and the choice of those that are held out."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import DataError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


@dataclass(frozen=True)
class Document:
    """One text: a file, or one line of a JSONL file (its name then ends in `:line`)."""

    name: str  # relative to the path it was found under, so that it is the same on every machine
    data: bytes


def read_documents(
    paths: Sequence[str | Path], suffixes: Sequence[str] = SUFFIXES, exclude: Sequence[str] = ()
) -> list[Document]:
    """Reads files and, recursively, folders, in the order of `paths` and sorted by name below each.

    Below a folder only names that end in one of `suffixes` are read; a file named in `paths` is always read.
    `exclude` holds glob patterns (`test`, `.*`) for single names of files and folders below a path. Each line
    of a `.jsonl` file is a document: an object with a string under "text". Links are followed, and a file
    that is reached twice is read once.

    Raises DataError: a path that is missing, a file that cannot be read, a malformed line, nothing found.
    """
    documents: list[Document] = []
    for name, file in find_files(paths, suffixes, exclude):
        data = read_file(file)
        documents.extend(_texts(name, file, data) if file.suffix == ".jsonl" else [Document(name, data)])
    if not documents:
        raise nothing_found(paths, suffixes, exclude)
    return documents


def nothing_found(paths: Sequence[str | Path], suffixes: Sequence[str], exclude: Sequence[str]) -> DataError:
    """The error for a corpus without a document."""
    return DataError(
        f"no document found in {', '.join(map(str, paths)) or 'an empty list of paths'}: looked for "
        f"names that end in {', '.join(suffixes)}, and left out {', '.join(exclude) or 'nothing'}; "
        "name other paths or suffixes"
    )


def find_files(
    paths: Sequence[str | Path], suffixes: Sequence[str], exclude: Sequence[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Yields (name, file), each file once, in the order of `read_documents`. Raises DataError likewise."""
    seen: set[Path] = set()
    for path in (Path(p).expanduser() for p in paths):
        for name, file in _files(path, tuple(suffixes), tuple(exclude)):
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield name, file


def _files(path: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...]) -> list[tuple[str, Path]]:
    if not path.exists():
        raise DataError(f"path {path} does not exist (working folder: {Path.cwd()}): correct it or create it")
    if not path.is_dir():
        return [(path.name, path)]
    found: list[tuple[str, Path]] = []
    folders, visited = [path], set()
    while folders:
        folder = folders.pop()
        if folder.resolve() in visited:  # a link to a folder above would never end
            continue
        visited.add(folder.resolve())
        for entry in _entries(folder):
            if any(fnmatch(entry.name, pattern) for pattern in exclude):
                continue
            if entry.is_dir():
                folders.append(entry)
            elif entry.name.endswith(suffixes):
                found.append((entry.relative_to(path).as_posix(), entry))
    return sorted(found)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"folder {folder} cannot be read ({error}): make it readable or exclude it") from error


def read_file(file: Path) -> bytes:
    """Raises DataError that names the file."""
    if not file.is_file():  # opening a pipe would wait for ever
        raise DataError(f"{file} is a broken link or no regular file: remove it, or exclude it")
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"file {file} cannot be read ({error}): make it readable, or exclude it") from error


def _texts(name: str, file: Path, data: bytes) -> Iterator[Document]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield Document(f"{name}:{number}", text_of(line, file, partial(int, number)))


def text_of(line: bytes, file: Path, number: Callable[[], int], key: str = "text") -> bytes:
    """The text under `key` of a line of a JSONL file. `number()`: the line's, for the message of a DataError."""
    record = json_object(line, file, number, f'a string under "{key}"')
    if not isinstance(record.get(key), str):
        found = f"the keys {list(record)}, and a {type(record.get(key)).__name__}"
        raise malformed(file, number(), f'a string under "{key}"', found)
    # JSON can spell half of a surrogate pair; its bytes are kept as they are rather than refused.
    return record[key].encode("utf-8", "surrogatepass")


def json_object(line: bytes, file: Path, number: Callable[[], int], needed: str) -> dict[str, Any]:
    """The object in a line of a JSONL file. Raises DataError, which says that one with `needed` was needed."""
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise malformed(file, number(), needed, f"text that is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise malformed(file, number(), needed, f"a JSON {type(record).__name__}")
    return record


def malformed(file: Path, number: int, needed: str, found: str) -> DataError:
    """The error for one line of a JSONL file."""
    return DataError(
        f"{file}, line {number}: needed one JSON object with {needed}, found {found}; correct the line or remove it"
    )


def split[D: Document](documents: Sequence[D], held_out_fraction: float, seed: int) -> tuple[list[D], list[D]]:
    """Splits into (train, held out), each in the order given.

    A document's side depends on its name, the fraction and the seed alone, so adding documents moves none of
    the others. The one exception keeps both sides from being empty: then the document nearest to the border
    changes side. Raises DataError when there are fewer than two documents.
    """
    if len(documents) < 2:
        raise DataError(
            f"{len(documents)} document cannot be split into a training and a held-out side: at least "
            "2 with text are needed; add files, or cut the file into several (or into lines of a .jsonl file)"
        )
    places = [_uniform("split", seed, document.name) for document in documents]
    border = held_out_fraction
    held_out = [place < border for place in places]
    if not any(held_out):
        held_out[int(np.argmin(places))] = True
    if all(held_out):
        held_out[int(np.argmax(places))] = False
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    return train, [document for document, out in zip(documents, held_out, strict=True) if out]


def limit(documents: Sequence[Document], limit_bytes: int, seed: int) -> tuple[list[Document], list[Document]]:
    """Chooses whole documents of at most `limit_bytes` bytes together: (kept, left out), in the order given.

    Documents are tried in an order drawn from the seed, and each is kept if it still fits. Raises DataError
    when none fits.
    """
    left, kept = limit_bytes, set()
    for index in sorted(range(len(documents)), key=lambda i: _uniform("limit", seed, documents[i].name)):
        if len(documents[index].data) <= left:
            left -= len(documents[index].data)
            kept.add(index)
    if not kept:
        smallest = min(documents, key=lambda document: len(document.data))
        raise DataError(
            f"no document fits into limit_bytes={limit_bytes}: the smallest, {smallest.name}, has "
            f"{len(smallest.data)} bytes; raise limit_bytes"
        )
    chosen = [document for i, document in enumerate(documents) if i in kept]
    return chosen, [document for i, document in enumerate(documents) if i not in kept]


def _uniform(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that is the same on every machine and in every Python."""
    key = f"{purpose}:{seed}:{name}".encode("utf-8", "surrogateescape")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53


def bigram_entropy(batches: Iterable[Mapping[str, np.ndarray]], vocab_size: int) -> float:
    """Empirical H(target | token) in nats per token, over exactly the pairs that have weight 1.

    No model that sees only the previous token can score lower on these batches, so a loss below it shows that
    more than the previous token was used. Batches are `tokens`, `targets` int [rows, positions] and `weights`
    float of the same shape. Raises DataError when no pair has weight 1.
    """
    counts = np.zeros(vocab_size * vocab_size, dtype=np.int64)
    for batch in batches:
        scored = np.asarray(batch["weights"]) == 1
        pairs = batch["tokens"][scored].astype(np.int64) * vocab_size + batch["targets"][scored]
        counts += np.bincount(pairs, minlength=counts.size)
    if counts.sum() == 0:
        raise DataError("bigram entropy needs at least one pair with weight 1, found none: hold out more text")
    table = counts.reshape(vocab_size, vocab_size)
    used = table > 0
    conditional = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return float(-(table[used] * np.log(conditional[used])).sum() / counts.sum())
