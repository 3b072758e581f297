"""The largest buffers that are alive when a compiled step needs most memory, from what XLA writes about its own plan.

XLA says so only in files: which values are alive at the peak (`*-live-range.txt`), and which share a buffer
(`*-buffer-assignment.txt`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxpar.estimate.hlo_text import Instruction, Module
from jaxpar.estimate.source_lines import SourceLines, best_line, model_lines

_ALIVE = re.compile(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes")
_ALLOCATION = re.compile(r"^allocation (\d+): ")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")

Value = tuple[str, str]  # instruction, which element of its result


class _Place(NamedTuple):
    allocation: int
    offset: int
    size: int
    shape: str


@dataclass(frozen=True)
class Buffer:
    """`what`: the argument of the step, or the operation that fills it; `source`: `file:number`, or ''."""

    bytes: int
    shape: str
    what: str
    source: str


def dump_options(directory: str) -> dict[str, int | bool | str]:
    """Options of the compiler under which it writes what `largest_buffers` reads."""
    return {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}


def largest_buffers(directory: Path, module: Module, most: int = 10) -> tuple[Buffer, ...]:
    """The largest first; () where the compiler has written nothing that can be read."""
    ranges, places = (_text(directory, f"*-{name}.txt") for name in ("live-range", "buffer-assignment"))
    assigned = dict(_assigned(places))
    # Values that are written in place are several in one buffer: it counts once.
    alive = dict.fromkeys(assigned[value] for value in _alive(ranges) if value in assigned)
    writers: dict[_Place, list[str]] = {}
    for (name, _), place in assigned.items():
        writers.setdefault(place, []).append(name)
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions.values()}
    lines = SourceLines(module.tables)
    largest = sorted(alive, key=lambda place: -place.size)[:most]
    return tuple(_buffer(p, [instructions[n] for n in writers[p] if n in instructions], lines) for p in largest)


def _text(directory: Path, pattern: str) -> str:
    """Of the largest module: small ones, such as a constant's, are compiled beside it."""
    files = sorted(directory.glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


def _alive(text: str) -> Iterator[Value]:
    start = text.find("(peak):")
    for line in text[start:].splitlines()[1:] if start >= 0 else ():
        found = _ALIVE.match(line)
        if found is None:
            return
        yield found.group(1), found.group(2)


def _assigned(text: str) -> Iterator[tuple[Value, _Place]]:
    allocation = -1
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            allocation = int(found.group(1))
        elif found := _VALUE.match(line):
            name, element, size, offset, shape = found.groups()
            yield (name, element or ""), _Place(allocation, int(offset), int(size), shape.partition("{")[0])


def _buffer(place: _Place, writers: list[Instruction], lines: SourceLines) -> Buffer:
    """Named by the step's argument that lies there, else by the first operation that comes from the model."""
    argument = next((i for i in writers if i.opcode == "parameter" and i.op_name), None)
    if argument is not None:
        return Buffer(place.size, place.shape, argument.op_name.replace("\\'", "'"), "")
    frames = {i: lines.frames(i.attributes) for i in writers if i.opcode not in ("while", "parameter", "tuple")}
    best = next((i for i, f in frames.items() if model_lines(f)), next((i for i, f in frames.items() if f), None))
    if best is None:
        return Buffer(place.size, place.shape, "", "")
    return Buffer(place.size, place.shape, best.op_name.rpartition("/")[2], best_line(frames[best]))
