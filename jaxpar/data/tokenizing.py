"""Text to shards of token ids, over processes, so that a run killed at any instant goes on where it was."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from jaxpar.data.shards import FORMAT, INDEX, PARTIAL, Index, ShardInfo, load_index, read_info, whole_file, write_shard
from jaxpar.data.sources import Piece, Sources, pieces_of, read_piece
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.data.tokenizer_file import FileTokenizer, load_tokenizer
from jaxpar.errors import ConfigError, DataError

PLAN = "plan.json"
TOKENIZER = "tokenizer.json"

# (bytes of input done, bytes of input in all), after each shard.
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Tokenizing:
    """What is read, and what becomes of it; the shards do not depend on the number of processes."""

    sources: Sources
    tokenizer: str = "bytes"  # or the path of a `tokenizer.json`
    end: str | None = None  # the token of that file that ends a document
    shard_bytes: int = 2**26  # of text in a shard, about

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes must be at least 1, found {self.shard_bytes}")


def tokenize(job: Tokenizing, directory: Path, processes: int = 1, report: Report = lambda done, total: None) -> Index:
    """Writes the shards that are not there yet, then the index. Does nothing where the index is there.

    Raises DataError: what cannot be read, a folder that holds other data or is being written, and a worker that was
    killed. Shards that are finished stay, and the same call goes on from them.
    """
    tokenizer = load_tokenizer(job.tokenizer, job.end)
    pieces = pieces_of(job.sources, job.shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        _check_plan(job, tokenizer, pieces, directory)
        if (directory / INDEX).exists():
            return load_index(directory)
        for left in directory.glob(f"*{PARTIAL}"):  # of a run that was killed
            left.unlink()
        shards = {f"{number:05}": part for number, part in enumerate(_grouped(pieces, job.shard_bytes))}
        infos = {name: info for name in shards if (info := read_info(directory, name))}
        _report(report, shards, infos)
        for info in _write(job, directory, {n: part for n, part in shards.items() if n not in infos}, processes):
            infos[info.name] = info
            _report(report, shards, infos)
        index = _index(job, directory, tokenizer, [infos[name] for name in shards])
        index.save()
        return index


def _index(job: Tokenizing, directory: Path, tokenizer: Tokenizer, infos: Sequence[ShardInfo]) -> Index:
    name = TOKENIZER if isinstance(tokenizer, FileTokenizer) else job.tokenizer
    return Index(directory, name, job.end, tokenizer.vocab_size, tuple(infos))


def _report(report: Report, shards: Mapping[str, Sequence[Piece]], done: Mapping[str, ShardInfo]) -> None:
    sizes = {name: sum(piece.bytes for piece in part) for name, part in shards.items()}
    report(sum(sizes[name] for name in done), sum(sizes.values()))


def _grouped(pieces: Sequence[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Consecutive pieces until they reach the size of a shard."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.bytes
        if size >= shard_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_plan(job: Tokenizing, tokenizer: Tokenizer, pieces: Sequence[Piece], directory: Path) -> None:
    """Notes in the folder what its shards are made of; raises DataError where they are made of something else."""
    paths = dict.fromkeys(piece.path for piece in pieces)
    files = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    plan = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "shard_bytes": job.shard_bytes,
        "key": job.sources.key,
        "input": hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest(),
    }
    path = directory / PLAN
    if path.exists():
        before = json.loads(path.read_text())
        if different := [name for name in plan if before.get(name) != plan[name]]:
            raise DataError(
                f"{directory} holds shards made otherwise: {', '.join(different)} differ (the input, if a file was "
                "added, changed or removed); undo the change, name another folder, or delete that one"
            )
        return
    if isinstance(tokenizer, FileTokenizer):  # so that the folder can be moved without the tokenizer's
        with whole_file(directory / TOKENIZER) as file:
            file.write(tokenizer.content)
    with whole_file(path) as file:
        file.write(json.dumps(plan).encode())


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as lock:  # a lock ends with its process, however that ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"another process writes to {directory}: wait for it, or name another folder") from error
        yield


def _write(
    job: Tokenizing, directory: Path, shards: Mapping[str, Sequence[Piece]], processes: int
) -> Iterator[ShardInfo]:
    """Writes the shards, and yields each when it is whole."""
    processes = min(processes, len(shards))
    if processes <= 1:
        worker = _Worker(job, directory)
        yield from (worker.write(name, part) for name, part in shards.items())
        return
    context = multiprocessing.get_context("spawn")  # jax has threads, which do not survive a fork
    reader, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _start_worker, (job, directory, reader))
    try:
        for done in as_completed([pool.submit(_write_in_worker, name, part) for name, part in shards.items()]):
            yield done.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, perhaps for want of memory: finished shards are kept; run it again, with "
            "fewer processes or smaller shards"
        ) from error
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)
        reader.close()


@dataclass(frozen=True)
class _Worker:
    job: Tokenizing
    directory: Path

    def write(self, name: str, pieces: Sequence[Piece]) -> ShardInfo:
        key = self.job.sources.key
        texts = (text for piece in pieces for text in read_piece(piece, key))
        return write_shard(self.directory, name, texts, load_tokenizer(self.job.tokenizer, self.job.end))


_worker: _Worker


def _start_worker(job: Tokenizing, directory: Path, lifeline: Connection) -> None:
    global _worker
    _worker = _Worker(job, directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: Connection) -> None:
    """Waits for the parent to close its end of the pipe, or to be killed."""
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(1)


def _write_in_worker(name: str, pieces: Sequence[Piece]) -> ShardInfo:
    return _worker.write(name, pieces)
