"""`jaxpar tokenize INPUT... -o DIR`: text to shards of token ids."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxpar.data.sources import ALL_SUFFIXES, Sources
from jaxpar.data.tokenizing import Report, Tokenizing, tokenize
from jaxpar.errors import ConfigError

_PLAIN_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class TokenizeConfig:
    """Writes token ids to a folder for `TokenData`. Killed at any instant, the same command goes on.

    Attributes:
      inputs: files, folders, and datasets that Hugging Face's `datasets` has saved.
      output: the folder to write.
      tokenizer: `bytes`, or the path of a tokenizer.json.
      end: the token of a tokenizer.json that ends a document; by default the usual one.
      processes: how many work at once.
      key: of the text in JSONL, Parquet and saved datasets.
      suffixes: which files of a folder.
      exclude: glob patterns for names of files and folders to leave out.
      shard_bytes: of text in a shard, about.
    """

    inputs: tyro.conf.Positional[tuple[str, ...]]
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    tokenizer: str = "bytes"
    end: str | None = None
    processes: int = os.cpu_count() or 1
    key: str = "text"
    suffixes: tuple[str, ...] = ALL_SUFFIXES
    exclude: tuple[str, ...] = (".*",)
    shard_bytes: int = 2**26


def tokenize_command(arguments: Sequence[str]) -> int:
    """Writes the folder and says what is in it; 0."""
    config = tyro.cli(TokenizeConfig, args=list(arguments), prog="jaxpar tokenize")
    if config.processes < 1:
        raise ConfigError(f"processes must be at least 1, found {config.processes}")
    sources = Sources(config.inputs, config.suffixes, config.exclude, config.key)
    job = Tokenizing(sources, config.tokenizer, config.end, config.shard_bytes)
    with _progress(Console()) as report:
        index = tokenize(job, config.output, config.processes, report)
    documents = sum(shard.documents for shard in index.shards)
    empty = sum(shard.empty for shard in index.shards)
    print(
        f"{index.tokens:,} tokens of {documents:,} documents in {len(index.shards)} shards in {config.output}/"
        f" (vocabulary of {index.vocab_size:,}, {index.dtype.name}; {empty:,} empty documents left out)"
    )
    return 0


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """A bar on a terminal, a line every few seconds elsewhere."""
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("tokenize"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("tokenize", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


class _Lines:
    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._printed >= _PLAIN_EVERY:
            self._printed = time.monotonic()
            print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / max(total, 1):.0%})", flush=True)
