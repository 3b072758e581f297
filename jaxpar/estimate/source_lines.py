"""From an instruction of a compiled program to the source lines it was traced from.

XLA prints four numbered tables in front of the computations (files, functions, places, frames) and gives each
instruction the number of its innermost frame; older ones print `source_file="..." source_line=7` at the instruction.
"""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)
# Wrappers: what they do was asked for by who called them.
_WRAPPERS = (f"{PACKAGE}/collectives.py",)
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})

_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_INLINE = re.compile(r'source_file="([^"]*)".*?source_line=(\d+)')
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True)
class Frame:
    """A line of source."""

    file: str
    line: int

    @property
    def ours(self) -> bool:
        """Whether jaxpar itself stands there."""
        return self.file.startswith(f"{PACKAGE}/")

    @property
    def executor(self) -> bool:
        return self.file.startswith(f"{PACKAGE}/executor/")

    @property
    def region(self) -> bool:
        """Whether it is in the part of the step in which the model runs."""
        return self.file == f"{PACKAGE}/executor/region.py"

    @property
    def library(self) -> bool:
        return self.file.startswith(_LIBRARIES) and not self.ours

    def __str__(self) -> str:
        """Relative to the working directory where it is below it."""
        path = Path(self.file)
        here = Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"


class SourceLines:
    """The tables of one module. `text`: what stands before its first computation."""

    def __init__(self, text: str):
        self.text = text

    def frames(self, attributes: str) -> tuple[Frame, ...]:
        """The call stack of the instruction with these attributes, innermost first; () where none is known."""
        if found := _FRAME_ID.search(attributes):
            return tuple(self._walk(int(found.group(1))))
        if found := _INLINE.search(attributes):
            return (Frame(found.group(1), int(found.group(2))),)
        return ()

    def _walk(self, number: int) -> Iterator[Frame]:
        seen = set[int]()
        while number in self._stack and number not in seen:
            seen.add(number)
            place, parent = self._stack[number]
            if place in self._places:
                yield self._places[place]
            number = parent - self._offset

    @cached_property
    def _offset(self) -> int:
        """What is added to the number of a parent, as seen in the first frame, which has none."""
        return self._stack[min(self._stack)][1] if self._stack else 0

    @cached_property
    def _stack(self) -> dict[int, tuple[int, int]]:
        rows = {n: dict(_numbers(text)) for n, text in self._table("StackFrames")}
        return {n: (row.get("file_location_id", 0), row.get("parent_frame_id", 0)) for n, row in rows.items()}

    @cached_property
    def _places(self) -> dict[int, Frame]:
        files = {n: text.strip('"') for n, text in self._table("FileNames")}
        rows = {n: dict(_numbers(text)) for n, text in self._table("FileLocations")}
        return {n: Frame(files.get(row.get("file_name_id", 0), "?"), row.get("line", 0)) for n, row in rows.items()}

    def _table(self, name: str) -> Iterator[tuple[int, str]]:
        start = self.text.find(f"\n{name}\n")
        if start < 0:
            return
        for line in self.text[start + len(name) + 2 : self.text.find("\n\n", start + 1)].splitlines():
            number, _, rest = line.partition(" ")
            yield int(number), rest


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    return ((key, int(value)) for key, value in _NUMBER.findall(text))


def asked_by(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost line that is no wrapper's and no library's."""
    return next((f for f in frames if f.file not in _WRAPPERS and not f.library), None)


def model_lines(frames: tuple[Frame, ...]) -> list[Frame]:
    """The lines of the model, which is what jaxpar's executor calls, innermost first; [] where it did not ask."""
    inside = list(takewhile(lambda frame: not frame.executor, frames))
    theirs = [frame for frame in inside if not frame.ours and not frame.library]
    return list(dict.fromkeys(theirs)) if len(inside) < len(frames) or theirs == inside else []


def best_line(frames: tuple[Frame, ...]) -> str:
    """The model's lines, `layers.py:34 < model.py:7` for one called by another, or jaxpar's; '' if none is known."""
    if lines := model_lines(frames):
        return " < ".join(map(str, lines))
    found = asked_by(frames)
    return "" if found is None else str(found)
