"""A clock table as text: a line for each tick, a column for each stage, in it a task for each slot."""

from collections.abc import Sequence
from typing import Any

IDLE = "."
CUT = "..."

# `[tick][stage][slot]`: a task, or None.
Table = Sequence[Sequence[Sequence[Any]]]


def draw_table(ticks: Table, width: int, rows: int) -> str:
    """At most `width` characters wide, with at most `rows` ticks: the middle is left out, and the text says so."""
    if not ticks:
        return "no ticks"
    cells = _cells(ticks)
    wide = len(cells[0][0])
    label = max(len("tick"), len(str(len(ticks) - 1)) + 1)
    stages = len(cells[0])
    separator = next((s for s in (" | ", "|") if label + 1 + stages * (wide + len(s)) - len(s) <= width), "|")
    most = max((width - label - 1 - len(CUT)) // (wide + len(separator)), 1)
    shown = _ends(stages, most, (width - label - 1 + len(separator)) // (wide + len(separator)))
    titles = [f"stage {s}" if len(f"stage {s}") <= wide else f"s{s}" for s in range(stages)]
    lines = [_line("tick".rjust(label), [title.ljust(wide) for title in titles], shown, separator)]
    ends = _ends(len(ticks), rows, rows)
    for t in ends:
        if t is None:
            first, last = _missing(ends, len(ticks))
            lines.append(f"{CUT} ticks {first} to {last} are not shown")
        else:
            lines.append(_line(f"{t}:".rjust(label), cells[t], shown, separator))
    if None in shown:
        first, last = _missing(shown, stages)
        lines.append(f"{CUT} stages {first} to {last} are not shown")
    return "\n".join(lines)


def _cells(ticks: Table) -> list[list[str]]:
    """`[tick][stage]`, all of the same width."""
    names = [[[IDLE if task is None else str(task) for task in row] for row in tick] for tick in ticks]
    wide = max((len(name) for tick in names for row in tick for name in row), default=1)
    return [[" ".join(name.ljust(wide) for name in row) for row in tick] for tick in names]


def _ends(count: int, most: int, all_up_to: int) -> list[int | None]:
    """0 to `count` - 1, or `most` of them from both ends with None for those between."""
    if count <= all_up_to:
        return list(range(count))
    tail = most // 2
    return [*range(most - tail), None, *range(count - tail, count)]


def _missing(shown: list[int | None], count: int) -> tuple[int, int]:
    gone = sorted(set(range(count)) - set(shown))
    return gone[0], gone[-1]


def _line(label: str, cells: Sequence[str], shown: list[int | None], separator: str) -> str:
    return f"{label} {separator.join(CUT if s is None else cells[s] for s in shown)}".rstrip()
