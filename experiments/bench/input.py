"""How many tokens a second does each kind of data give, beside what a model takes?

    python -m experiments.bench.input

One thread reads ahead while the devices compute, so a loader is fast enough when it gives more than the model takes;
20 times as much leaves room for a machine that is busy. The text is Python's own standard library.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.data.chat import ChatData
from jaxpar.data.mixture import MixtureData
from jaxpar.data.sources import Sources
from jaxpar.data.synthetic import SyntheticData
from jaxpar.data.text import TextData
from jaxpar.data.token_data import TokenData
from jaxpar.data.tokenizing import Tokenizing, tokenize

MODEL = 20_000  # tokens/s that `make demo` takes on two CPU cores
STDLIB = sysconfig.get_path("stdlib")
EXCLUDE = (".*", "test", "tests", "idlelib", "site-packages", "__pycache__")


@dataclass(frozen=True)
class Rate:
    """What was measured: seconds until the first batch, tokens (padding left out) per second after it."""

    name: str
    start: float
    tokens: float


def kinds(folder: Path, row_length: int, rows: int) -> Iterator[tuple[str, Any]]:
    """Every kind of data, of the same rows."""
    text = TextData((STDLIB,), row_length, rows, (".py",), EXCLUDE, limit_bytes=8_000_000)
    yield "text", text
    tokenize(Tokenizing(Sources((STDLIB,), (".py",), EXCLUDE)), folder / "tokens")
    tokens = TokenData(str(folder / "tokens"), row_length, rows)
    yield "tokens on disk", tokens
    _write_chat(folder / "chat.jsonl")
    yield "chat", ChatData((str(folder / "chat.jsonl"),), row_length, rows)
    for task in ("uniform", "copy"):
        yield f"synthetic {task}", SyntheticData(257, row_length, rows, task)  # type: ignore[arg-type]
    yield "mixture", MixtureData({"a": text, "b": tokens}, {"a": 0.7, "b": 0.3}, rows)


def _write_chat(path: Path) -> None:
    with path.open("w") as file:
        for source in sorted(Path(STDLIB).glob("*.py")):
            lines = source.read_text(errors="replace").split("\n\n")
            messages = [{"role": ("user", "assistant")[i % 2], "content": line} for i, line in enumerate(lines[:20])]
            if len(messages) > 1:
                file.write(json.dumps({"messages": messages}) + "\n")


def measure(name: str, data: Any, seconds: float) -> Rate:
    """Takes batches for so long, of one process."""
    started = time.perf_counter()
    batches = data.build().train()
    next(batches)
    first = time.perf_counter()
    tokens = 0
    while (now := time.perf_counter()) < first + seconds:
        tokens += int((next(batches)["segments"] > 0).sum())
    batches.close()
    return Rate(name, first - started, tokens / (now - first))


def table(rates: Sequence[Rate], model: float) -> str:
    """A line for each kind."""
    lines = [f"{'data':<20}{'first batch':>14}{'tokens/s':>14}{'x model':>10}"]
    lines += [f"{r.name:<20}{r.start:>12.2f} s{r.tokens:>14,.0f}{r.tokens / model:>10.0f}" for r in rates]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-length", type=int, default=128, help="positions of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure each kind for")
    parser.add_argument("--model", type=float, default=MODEL, help="tokens/s that the model takes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = kinds(Path(folder), options.row_length, options.rows)
        rates = [measure(name, data, options.seconds) for name, data in found]
    print(table(rates, options.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
