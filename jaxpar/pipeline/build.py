"""Schedules by name, with the rules on what each can be built for."""

import difflib
import sys

from jaxpar.errors import PlanError
from jaxpar.pipeline.gpipe import gpipe
from jaxpar.pipeline.interleaved import interleaved
from jaxpar.pipeline.one_f_one_b import one_f_one_b
from jaxpar.pipeline.schedule import Schedule
from jaxpar.pipeline.zero_bubble import zero_bubble
from jaxpar.pipeline.zero_bubble_v import zero_bubble_v

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v")
_LANES = ("gpipe", "1f1b", "zero_bubble")
_FILL = ("zero_bubble", "zero_bubble_v")


def build(
    name: str, stages: int, microbatches: int, virtual_stages: int = 1, *, lanes: int = 1, fill: bool = False
) -> Schedule:
    """The schedule `name` of `SCHEDULES`, validated.

    `virtual_stages`: chunks of layers on each stage, of "interleaved"; "zero_bubble_v" always has 2. `lanes`: stacks
    of layers, each spread over all stages. `fill`: a zero-bubble schedule plays W tasks in slots left idle. Raises
    `PlanError` for what cannot be built; if that is the microbatch count, with the nearest that can.
    """
    check(name, stages, microbatches, virtual_stages, lanes=lanes, fill=fill)
    schedule = _built(name, stages, microbatches, virtual_stages, lanes, fill)
    schedule.validate()
    return schedule


def check(
    name: str, stages: int, microbatches: int, virtual_stages: int = 1, *, lanes: int = 1, fill: bool = False
) -> None:
    """Raises the errors of `build` without building."""
    legal = legal_microbatches(name, stages, virtual_stages, lanes=lanes, fill=fill)
    if microbatches not in legal:
        near = f"{legal.start}, {legal.start + 1}, {legal.start + 2}"
        rule = f"{_described(name, stages, lanes, fill)} needs at least {legal.start} microbatches"
        mend = " or no fill" if fill and microbatches >= 1 else ""
        raise PlanError(f"{rule}, found {microbatches}; the nearest legal counts are {near}: take one of these{mend}")


def legal_microbatches(name: str, stages: int, virtual_stages: int = 1, *, lanes: int = 1, fill: bool = False) -> range:
    """Every microbatch count for which `build` builds the schedule; raises `PlanError` where none is legal.

    Any count from 1, also fewer than stages; with `fill` from 2 p lanes - 1, for "zero_bubble_v" from p: with fewer,
    the last forward is over before there are W tasks to fill the slots it leaves.
    """
    if problems := _problems(name, stages, virtual_stages, lanes, fill):
        raise PlanError(problems)
    least = 1
    if fill:
        least = stages if name == "zero_bubble_v" else 2 * stages * lanes - 1
    return range(least, sys.maxsize)


def _problems(name: str, stages: int, virtual_stages: int, lanes: int, fill: bool) -> list[str]:
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return [f"there is no pipeline schedule {name!r}; schedules: {', '.join(SCHEDULES)}{hint}"]
    counts = {"stages": stages, "virtual_stages": virtual_stages, "lanes": lanes}
    problems = [f"{what} must be at least 1, found {count}" for what, count in counts.items() if count < 1]
    if name == "zero_bubble_v" and virtual_stages > 2:
        problems.append(f"schedule 'zero_bubble_v' has 2 virtual stages, found {virtual_stages}: leave it out")
    elif name not in ("interleaved", "zero_bubble_v") and virtual_stages > 1:
        problems.append(f"schedule {name!r} has 1 virtual stage, found {virtual_stages}: take 'interleaved' for more")
    if lanes > 1 and name not in _LANES:
        problems.append(f"schedule {name!r} has one lane, found {lanes} stacks of layers: take {' or '.join(_LANES)}")
    if fill and name not in _FILL:
        problems.append(f"schedule {name!r} has no W tasks to fill idle slots with: take {' or '.join(_FILL)}")
    return problems


def _described(name: str, stages: int, lanes: int, fill: bool) -> str:
    stacks = f" and {lanes} lanes" if lanes > 1 else ""
    return f"schedule {name!r}{' with fill' if fill else ''} on {stages} stages{stacks}"


def _built(name: str, stages: int, microbatches: int, virtual_stages: int, lanes: int, fill: bool) -> Schedule:
    match name:
        case "gpipe":
            return gpipe(stages, microbatches, lanes)
        case "1f1b":
            return one_f_one_b(stages, microbatches, lanes)
        case "interleaved":
            return interleaved(stages, microbatches, virtual_stages)
        case "zero_bubble":
            return zero_bubble(stages, microbatches, lanes, fill)
        case _:
            return zero_bubble_v(stages, microbatches, fill)
