"""A schedule of the user's own, read from a clock table as `Schedule.draw` writes it."""

import re

from jaxpar.errors import PlanError
from jaxpar.pipeline.draw import CUT, IDLE
from jaxpar.pipeline.schedule import Entry, Kind, Schedule, Slot, Task

_TASK = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")
_LABEL = re.compile(r"^\s*\d+:")


def from_table(
    text: str, name: str = "table", *, lanes: tuple[int, ...] | None = None, folded: bool = False
) -> Schedule:
    """The schedule of a text such as

        F0 . | .  .
        F1 . | F0 B0
        .  B0 | F1 B1
        .  B1 | .  .

    A line is a tick, `|` divides stages, blanks divide slots; `F2.1` is chunk 1 on microbatch 2, `.` waits. A line may
    begin with its number and a colon; empty lines and a heading that begins with "tick" are skipped. What a slot is
    for follows from the tasks in it. `lanes`, `folded`: as in `Schedule`; by default all chunks share a lane.

    Raises `PlanError` that names the tick and the stage of what cannot be read, or all that `Schedule.validate` finds.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("tick")]
    if not lines:
        raise PlanError("a clock table needs at least one tick, found none")
    ticks = tuple(_tick(t, _LABEL.sub("", line)) for t, line in enumerate(lines))
    tasks = [task for tick in ticks for row in tick for task in row if task is not None]
    own = lanes or (0,) * (1 + max((task.chunk for task in tasks), default=0))
    microbatches = 1 + max((task.microbatch for task in tasks), default=0)
    slots = tuple(_slot(ticks, i, own) for i in range(len(ticks[0][0])))
    schedule = Schedule(name, len(ticks[0]), microbatches, own, slots, ticks, folded)
    schedule.validate()
    return schedule


def _tick(t: int, line: str) -> tuple[tuple[Entry, ...], ...]:
    if CUT in line:
        raise PlanError(f"tick {t}: a drawing that leaves something out ({CUT}) cannot be read; draw it whole")
    return tuple(tuple(_entry(entry, t, stage) for entry in cell.split()) for stage, cell in enumerate(line.split("|")))


def _entry(entry: str, t: int, stage: int) -> Entry:
    if entry == IDLE:
        return None
    if found := _TASK.fullmatch(entry):
        kind, microbatch, chunk = found.groups()
        return Task(Kind(kind), int(microbatch), int(chunk or 0))
    raise PlanError(f"tick {t}, stage {stage}: {entry!r} is not a task such as F0, B12 or W3.1, nor {IDLE!r} for none")


def _slot(ticks: tuple[tuple[tuple[Entry, ...], ...], ...], i: int, lanes: tuple[int, ...]) -> Slot:
    """What slot `i` is for: F or B if it holds any, with W tasks that fill it or without, else W."""
    held = {
        Slot(task.kind, lanes[task.chunk] if task.chunk < len(lanes) else 0)
        for tick in ticks
        for row in tick
        if i < len(row) and (task := row[i]) is not None
    }
    own = {slot for slot in held if slot.kind != Kind.W} or held
    if len(own) != 1:
        kinds = " and ".join(sorted(f"{slot.kind} of lane {slot.lane}" for slot in own)) or "no task at all"
        raise PlanError(f"slot {i} of the clock table must be for one kind of one lane, found {kinds}")
    return own.pop()
