"""Why a search came out as it did: where time and memory go, why not the next plan, what nearly fits, ways out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress
from jaxpar.planner.ways_out import WayOut, ways_out
from jaxpar.planner.words import name, seconds

# Of a step: what is shorter or smaller is not worth a line.
_SHOWN = 0.002
_OF_DIFFERENCE = 0.1
# Plans whose times are this close are told apart by memory, or not at all.
SAME = 0.001


@dataclass(frozen=True)
class Explanation:
    """Of the best plan, if there is one.

    Attributes:
      runner_up: the next that differs by more than noise in time, or None.
      near: plans that would be faster and do not fit, the smallest overflow first.
      ways_out: where there is no plan, changes that give one, the cheapest first.
    """

    ranked: Ranked
    runner_up: Candidate | None
    near: tuple[Candidate, ...]
    ways_out: tuple[WayOut, ...]

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """The best plan, the runner-up, and the faster ones that nearly fit."""
        runner_up = () if self.runner_up is None else (self.runner_up,)
        return (self.ranked.best, *runner_up, *self.near)

    def text(self) -> str:
        if not self.ranked.found:
            return "\n".join(_no_plan(self))
        best = self.ranked.best
        return "\n".join([*_parts(best), *_against(best, self.runner_up), *_near(self)])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "runner_up": None if self.runner_up is None else self.runner_up.to_dict(),
            "near": [candidate.to_dict() for candidate in self.near],
            "ways_out": [way.to_dict() for way in self.ways_out],
            "text": self.text(),
        }


def explain(ranked: Ranked, progress: Progress = lambda what, done, of: None) -> Explanation:
    """Searches again for ways out, where nothing fits or is legal."""
    if not ranked.found:
        return Explanation(ranked, None, ranked.near[:3], tuple(ways_out(ranked, progress)))
    best = ranked.best
    others = (c for c in ranked.found[1:] if c.time.total > best.time.total * (1 + SAME))
    faster = [c for c in ranked.near if c.time.total < best.time.total * (1 - SAME)]
    return Explanation(ranked, next(others, None), _distinct(faster)[:3], ())


def _distinct(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """One of each memory: those that differ in what costs none are one to a reader."""
    return tuple({c.memory.total: c for c in reversed(candidates)}.values())[::-1]


def _parts(best: Candidate) -> Iterator[str]:
    yield f"where the {seconds(best.time.total)} of a step go:"
    for part, value in sorted(best.time.parts.items(), key=lambda item: -item[1]):
        if value > _SHOWN * best.time.total:
            yield f"  {part:<13}{seconds(value):>10} {value / best.time.total:>6.1%}"
    yield f"where {gigabytes(best.memory.total)} of {gigabytes(best.limit)} on each device go:"
    for part, size in sorted(best.memory.parts.items(), key=lambda item: -item[1]):
        if size > _SHOWN * best.memory.total:
            yield f"  {part:<13}{gigabytes(size):>10} {size / best.memory.total:>6.1%}"


def _against(best: Candidate, other: Candidate | None) -> Iterator[str]:
    if other is None:
        yield "no other plan fits that differs in time"
        return
    slower = other.time.total - best.time.total
    yield f"why not {name(other)}: {seconds(slower)} slower ({slower / best.time.total:.1%})"
    yield from differences(best, other)


def differences(best: Candidate, other: Candidate) -> Iterator[str]:
    """What takes longer in `other`, and what it saves; a line for each part that matters."""
    parts = {part: other.time.parts[part] - value for part, value in best.time.parts.items()}
    for part, more in sorted(parts.items(), key=lambda item: -item[1]):
        if abs(more) > _OF_DIFFERENCE * abs(other.time.total - best.time.total):
            yield f"  {part:<13}{'+' if more > 0 else '-'}{seconds(abs(more))}"


def _near(explanation: Explanation) -> Iterator[str]:
    best = explanation.ranked.best
    for candidate in explanation.near:
        part, size = max(candidate.memory.parts.items(), key=lambda item: item[1])
        saved = 1 - candidate.time.total / best.time.total
        yield (
            f"would be {saved:.1%} faster, and is {gigabytes(candidate.overflow)} too large (most of it {part}, "
            f"{gigabytes(size)}): {name(candidate)}"
        )


def _no_plan(explanation: Explanation) -> Iterator[str]:
    if not explanation.ways_out:
        yield "no single change of what was tried helps: fewer or more devices, shorter rows, a smaller model"
        return
    yield "ways out, the cheapest first:"
    yield from (f"  {way}" for way in explanation.ways_out)
