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
from jaxpar.estimate.source_lines import Frame, SourceLines, best_line, model_lines

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
    largest = sorted(alive, key=lambda place: -place.size)[:most]
    names = _Names(module)
    return tuple(names.buffer(place, writers[place]) for place in largest)


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


class _Names:
    """What a person calls a buffer, told by the instructions that write to it."""

    def __init__(self, module: Module):
        self.module, self.lines = module, SourceLines(module.tables)
        self.home = {name: c for c in module.computations.values() for name in c.instructions}

    def buffer(self, place: _Place, writers: list[str]) -> Buffer:
        """Named by the step's argument that lies there, else by the first operation that comes from the model."""
        known = [self.home[name].instructions[name] for name in writers if name in self.home]
        argument = next((i for i in known if i.opcode == "parameter" and i.op_name), None)
        if argument is not None:
            return Buffer(place.size, place.shape, argument.op_name.replace("\\'", "'"), "")
        made = [i for i in known if i.opcode not in ("while", "parameter", "tuple")]
        told = [i for i in made if self._frames(i)]
        best = next((i for at in told for i in (at, *self._saved(at)) if model_lines(self._frames(i))), None)
        best = best or next(iter(told), None)
        if best is None:
            return Buffer(place.size, place.shape, "", "")
        return Buffer(place.size, place.shape, best.op_name.rpartition("/")[2], best_line(self._frames(best)))

    def _frames(self, at: Instruction) -> tuple[Frame, ...]:
        return self.lines.frames(at.attributes)

    def _saved(self, at: Instruction) -> Iterator[Instruction]:
        """Of something that is put away in part of a buffer (`dynamic-update-slice`): where it comes from."""
        inside = [i for name in at.callees for i in reversed(self.module.computations[name].instructions.values())]
        if at.opcode == "dynamic-update-slice" or any(i.opcode == "dynamic-update-slice" for i in inside):
            yield from inside
            yield from reversed(list(self.home[at.name].operands(at)))
