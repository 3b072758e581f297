"""A pipeline schedule as a value: which task every stage plays in every tick.

All stages run one program in lockstep. A tick is a row of slots that are played one after the other by all stages
together: a stage plays at most one task in a slot, and waits where it has none. What a stage sends in a tick arrives
at its neighbour before the next tick. The head of a microbatch is played by all stages, right after the forward of
the last chunk, in the same tick.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from jaxpar.errors import PlanError
from jaxpar.pipeline.draw import draw_table
from jaxpar.pipeline.layers import route


class Kind(StrEnum):
    """F: forward. B: backward, of the input alone where the schedule splits it. W: the weights' part of a split one."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True, order=True)
class Task:
    """One chunk of layers on one microbatch. `chunk`: which of its device's virtual stages, from 0."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Slot:
    """A place in every tick for tasks of `kind` of the chunks of one `lane`, or for a W that fills idle time."""

    kind: Kind
    lane: int = 0


@dataclass(frozen=True)
class Costs:
    """Time of one microbatch on one whole stage, all its chunks together, in any unit."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0

    def of(self, kind: Kind, split: bool) -> float:
        fused = self.backward + (0.0 if split else self.weight)
        return {Kind.F: self.forward, Kind.B: fused, Kind.W: self.weight}[kind]


Entry = Task | None


@dataclass(frozen=True)
class Schedule:
    """`lanes`: for each chunk of a device, the lane in whose slots it is played: chunks of the same stack of layers
    share a lane, different stacks have lanes of their own. `ticks`: `[tick][stage][slot]`. `folded`: odd chunks run
    from the last stage back to the first, so that the path through the chunks is a V.
    """

    name: str
    stages: int
    microbatches: int
    lanes: tuple[int, ...]
    slots: tuple[Slot, ...]
    ticks: tuple[tuple[tuple[Entry, ...], ...], ...]
    folded: bool = False

    @classmethod
    def from_tasks(
        cls,
        name: str,
        stages: int,
        microbatches: int,
        lanes: tuple[int, ...],
        slots: tuple[Slot, ...],
        tasks: Mapping[tuple[int, int, int], Task],
        folded: bool = False,
    ) -> "Schedule":
        """`tasks`: by `(tick, stage, slot)`; all other places are idle. Not validated."""
        ticks = range(1 + max((t for t, _, _ in tasks), default=-1))
        table = tuple(
            tuple(tuple(tasks.get((t, s, i)) for i in range(len(slots))) for s in range(stages)) for t in ticks
        )
        return cls(name, stages, microbatches, lanes, slots, table, folded)

    @property
    def chunks(self) -> int:
        """Virtual stages on one device."""
        return len(self.lanes)

    @property
    def split(self) -> bool:
        """Whether the weights' gradients are tasks of their own."""
        return any(slot.kind == Kind.W for slot in self.slots)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of task that each chunk plays once for every microbatch: of a forward-only schedule F alone."""
        there = {slot.kind for slot in self.slots}
        return tuple(kind for kind in Kind if kind in there)

    @cached_property
    def route(self) -> tuple[tuple[int, int], ...]:
        """`(stage, chunk)` in the order in which a microbatch visits them, which is the order of the layers."""
        return route(self.stages, self.chunks, self.folded)

    @cached_property
    def place(self) -> dict[tuple[int, int], int]:
        """`(stage, chunk)` -> its place in `route`."""
        return {where: q for q, where in enumerate(self.route)}

    def entries(self) -> Iterator[tuple[int, int, int, Task]]:
        """Every task as `(tick, stage, slot, task)`, in the order of time."""
        for t, tick in enumerate(self.ticks):
            for slot in range(len(self.slots)):
                for stage in range(self.stages):
                    if (task := tick[stage][slot]) is not None:
                        yield t, stage, slot, task

    def when(self) -> Mapping[tuple[int, Task], tuple[int, int]]:
        """`(stage, task)` -> `(tick, slot)`."""
        return self._when

    @cached_property
    def _when(self) -> dict[tuple[int, Task], tuple[int, int]]:
        return {(stage, task): (t, slot) for t, stage, slot, task in self.entries()}

    def validate(self) -> None:
        """Raises `PlanError` that lists every task missing, twice there, or played before what it needs has arrived."""
        if problems := [*_shape_problems(self)] or [*_count_problems(self)] or [*_order_problems(self)]:
            shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
            raise PlanError(f"schedule {self.name!r} cannot be played: " + "; ".join(shown))

    def peak_live(self) -> tuple[int, ...]:
        """By stage: the most chunks of saved activations held at once, from a forward to the last task that reads
        them, that tick included. Every stage allocates the largest number."""
        return self._peak(Kind.F)

    def peak_pending(self) -> tuple[int, ...]:
        """By stage: the most chunks at once whose B has been played and whose W has not, the tick of the W included;
        for each, the gradient of its output is kept as well. Zeros where no B is split."""
        return self._peak(Kind.B) if self.split else (0,) * self.stages

    def _peak(self, first: Kind) -> tuple[int, ...]:
        """By stage: the most chunks at once that are between their task `first` and their last one."""
        change = [[0] * (len(self.ticks) + 1) for _ in range(self.stages)]
        for (stage, task), (start, _) in self.when().items():
            if task.kind == first:
                end, _ = self.when()[stage, Task(self.kinds[-1], task.microbatch, task.chunk)]
                change[stage][start] += 1
                change[stage][end + 1] -= 1
        return tuple(max(accumulate(row)) for row in change)

    def durations(self, costs: Costs | None = None) -> list[list[float]]:
        """`[tick][slot]`: each slot lasts as long as its longest task on any stage, none if no stage has one."""
        costs = costs or Costs()
        last = [[0.0] * len(self.slots) for _ in self.ticks]
        for t, _, slot, task in self.entries():
            last[t][slot] = max(last[t][slot], costs.of(task.kind, self.split) / self.chunks)
        return last

    def time(self, costs: Costs | None = None) -> float:
        """How long a step's layers take."""
        return sum(map(sum, self.durations(costs)))

    def draw(self, width: int = 80, rows: int = 48) -> str:
        """The table as text, a line for each tick; says which ticks and stages are left out, if they are too many."""
        return draw_table(self.ticks, width, rows)

    def bubble(self, costs: Costs | None = None) -> float:
        """Time in which a device waits, over the time in which it works: (p - 1) / m for 1F1B."""
        costs = costs or Costs()
        work = self.microbatches * sum(costs.of(kind, self.split) for kind in self.kinds)
        return self.time(costs) / work - 1.0


def _shape_problems(schedule: Schedule) -> Iterator[str]:
    for t, tick in enumerate(schedule.ticks):
        if len(tick) != schedule.stages or any(len(row) != len(schedule.slots) for row in tick):
            yield f"tick {t} must have {schedule.stages} stages of {len(schedule.slots)} slots"
            return
    for t, stage, i, task in schedule.entries():
        slot = schedule.slots[i]
        if not (0 <= task.chunk < schedule.chunks and 0 <= task.microbatch < schedule.microbatches):
            yield f"tick {t}, stage {stage}: {task} is not among {schedule.microbatches} x {schedule.chunks} chunks"
        elif task.kind not in (slot.kind, Kind.W) or schedule.lanes[task.chunk] != slot.lane:
            yield f"tick {t}, stage {stage}: {task} does not fit the slot {slot.kind} of lane {slot.lane}"


def _count_problems(schedule: Schedule) -> Iterator[str]:
    found: dict[tuple[int, Task], int] = {}
    for _, stage, _, task in schedule.entries():
        found[stage, task] = found.get((stage, task), 0) + 1
    for stage in range(schedule.stages):
        for chunk in range(schedule.chunks):
            for m in range(schedule.microbatches):
                for kind in schedule.kinds:
                    times = found.pop((stage, Task(kind, m, chunk)), 0)
                    if times != 1:
                        yield f"stage {stage} plays {Task(kind, m, chunk)} {times} times"
    yield from (f"stage {stage} plays {task}, which is none of its tasks" for stage, task in found)


def _order_problems(schedule: Schedule) -> Iterator[str]:
    when = schedule.when()
    for (stage, task), (tick, slot) in when.items():
        q = schedule.place[stage, task.chunk]
        ahead = q + (1 if task.kind == Kind.B else -1)
        if task.kind != Kind.W and 0 <= ahead < len(schedule.route):
            other, chunk = schedule.route[ahead]
            needed = Task(task.kind, task.microbatch, chunk)
            # What stays on a stage is there at once; what travels arrives before the next tick.
            at = when[other, needed]
            if at >= (tick, slot) or (other != stage and at[0] == tick):
                place = "slot" if other == stage else "tick"
                yield f"tick {tick}, stage {stage}: {task} needs {needed} of stage {other} from an earlier {place}"
        if task.kind != Kind.F:
            own = Task(Kind.F if task.kind == Kind.B else Kind.B, task.microbatch, task.chunk)
            if when[stage, own] >= (tick, slot):
                yield f"tick {tick}, stage {stage}: {task} needs {own} of the same stage before it"
