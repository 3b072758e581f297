"""Text out of files of any size, in pieces that can be read apart: where each begins, and the documents in it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxpar.data.corpus import SUFFIXES, find_files, nothing_found, read_file, text_of
from jaxpar.errors import BackendError, DataError

ALL_SUFFIXES = (*SUFFIXES, ".parquet")
Kind = Literal["text", "jsonl", "parquet", "dataset"]


@dataclass(frozen=True)
class Sources:
    """What to read: files, folders, and folders that the package `datasets` has saved."""

    paths: tuple[str, ...]
    suffixes: tuple[str, ...] = ALL_SUFFIXES  # which files of a folder
    exclude: tuple[str, ...] = (".*",)  # glob patterns for names of files and folders to leave out
    key: str = "text"  # of the text in JSONL and in tables


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes of a text or JSONL file, row groups of a Parquet file, rows of a saved dataset."""

    path: str
    kind: Kind
    start: int
    stop: int
    bytes: int  # of the file, about


def pieces_of(sources: Sources, piece_bytes: int) -> list[Piece]:
    """Cuts into pieces of about `piece_bytes` where the format allows it, in an order that is always the same.

    Raises DataError: a path that is missing, a table without the column, nothing found.
    """
    found: list[Piece] = []
    for path in sources.paths:
        if (Path(path) / "dataset_info.json").exists() or (Path(path) / "dataset_dict.json").exists():
            found.extend(_dataset_pieces(Path(path), sources.key, piece_bytes))
            continue
        for _, file in find_files([path], sources.suffixes, sources.exclude):
            found.extend(_file_pieces(file, sources.key, piece_bytes))
    # A file that is reached twice is read once.
    found = list(dict.fromkeys(found))
    if not found:
        raise nothing_found(sources.paths, sources.suffixes, sources.exclude)
    return found


def read_piece(piece: Piece, key: str) -> Iterator[bytes]:
    """The text of each document that begins in the piece. Raises DataError: cannot be read, or malformed."""
    file = Path(piece.path)
    if piece.kind == "text":
        yield read_file(file)
    elif piece.kind == "jsonl":
        yield from _jsonl(file, piece, key)
    elif piece.kind == "parquet":
        table = _parquet(file).read_row_groups(list(range(piece.start, piece.stop)), columns=[key])
        yield from _column(table[key].to_pylist(), file, key)
    else:
        rows = _dataset(file).select(range(piece.start, piece.stop)).select_columns([key])
        yield from _column((row[key] for row in rows), file, key)


def _file_pieces(file: Path, key: str, piece_bytes: int) -> Iterator[Piece]:
    path = str(file.resolve())
    if file.suffix == ".parquet":
        groups = _parquet(file)
        _check_column(groups.schema_arrow.names, key, file)
        for group in range(groups.num_row_groups):
            yield Piece(path, "parquet", group, group + 1, groups.metadata.row_group(group).total_byte_size)
        return
    size = file.stat().st_size
    if file.suffix != ".jsonl":
        yield Piece(path, "text", 0, size, size)
        return
    for start in range(0, size, piece_bytes):
        stop = min(size, start + piece_bytes)
        yield Piece(path, "jsonl", start, stop, stop - start)


def _jsonl(file: Path, piece: Piece, key: str) -> Iterator[bytes]:
    with file.open("rb") as lines:
        if piece.start:
            lines.seek(piece.start - 1)
            lines.readline()  # the rest of a line that begins in the piece before
        while (at := lines.tell()) < piece.stop:
            line = lines.readline()
            if not line:
                return
            if line.strip():
                yield text_of(line, file, partial(_line_number, file, at), key)


def _line_number(file: Path, offset: int) -> int:
    with file.open("rb") as data:
        return data.read(offset).count(b"\n") + 1


def _column(values: Any, file: Path, key: str) -> Iterator[bytes]:
    for value in values:
        if not isinstance(value, str):
            raise DataError(f"{file}: needed text in column {key!r}, found a {type(value).__name__}; remove such rows")
        yield value.encode("utf-8", "surrogatepass")


def _parquet(file: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise BackendError(f"{file} needs the package pyarrow: pip install 'jaxpar[parquet]'") from error
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({error}): mend it, or exclude it") from error


def _dataset(path: Path) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise BackendError(f"{path} needs the package datasets: pip install 'jaxpar[hf]'") from error
    try:
        return load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a saved dataset ({error}): save it again") from error


def _dataset_pieces(path: Path, key: str, piece_bytes: int) -> Iterator[Piece]:
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise DataError(f"{path} holds the splits {', '.join(splits)}: name one of them, such as {path / splits[0]}")
    dataset = _dataset(path)
    _check_column(dataset.column_names, key, path)
    row_bytes = max(1, dataset.data.nbytes // max(1, len(dataset)))
    step = max(1, piece_bytes // row_bytes)
    for start in range(0, len(dataset), step):
        stop = min(len(dataset), start + step)
        yield Piece(str(path.resolve()), "dataset", start, stop, (stop - start) * row_bytes)


def _check_column(columns: Sequence[str], key: str, path: Path) -> None:
    if key not in columns:
        raise DataError(f"{path} has no column {key!r}; it has {', '.join(columns)}: name one of them as the key")
