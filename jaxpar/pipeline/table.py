"""A schedule as numbers: what the executor reads in every tick, and where in its ring buffers everything lies.

Buffers, each a ring on every stage: `inputs` (of forwards, as they arrive), `cotangents` (of backwards, as they
arrive), and by lane `saved` (from a forward to the last task that reads it) and `between` (from a split backward to its
weights' part). Slots are given out here, on the host, so that no buffer is larger than what is alive at once.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.pipeline.schedule import Kind, Schedule, Task

NONE = -1


@dataclass(frozen=True)
class Played:
    """One slot of the schedule, int32 `[tick, stage]`; `NONE` where there is nothing to do.

    Attributes:
      microbatch, chunk: of the task; 0 where there is none.
      valid: 1: the slot's own kind is played; 0: the stage waits, or fills the slot with another W.
      fills: 1: it plays a W in this slot.
      reads: slot of `inputs` (F) or `cotangents` (B).
      saved, between: slot of the lane's buffers; a stage that waits writes where nothing is alive.
      arrives: where what the neighbour sent in the tick before goes; `NONE`: nowhere.
      from_next: 1: it comes from the stage after this one; 0: from the one before.
      stays: where the result goes when the next chunk is on the same stage.
      next_chunk, next_last: whose weights are needed next in this lane, the first layer's or the last's.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    valid: np.ndarray
    fills: np.ndarray
    reads: np.ndarray
    saved: np.ndarray
    between: np.ndarray
    arrives: np.ndarray
    from_next: np.ndarray
    stays: np.ndarray
    next_chunk: np.ndarray
    next_last: np.ndarray


@dataclass(frozen=True)
class Ends:
    """What all stages do together, int32 `[tick]`: the microbatch, `NONE` if none, and the slot on the end's stage.

    `embed` writes `inputs` on the first stage; `head` writes `cotangents` on the last; `unembed` is the embedding's
    backward, whose gradient the first chunk's backward has just made.
    """

    embed: np.ndarray
    embed_slot: np.ndarray
    head: np.ndarray
    head_slot: np.ndarray
    unembed: np.ndarray


@dataclass(frozen=True)
class Segment:
    """Ticks `[start, stop)` in which the same slots are played. `always` and `sometimes`: indices of slots."""

    start: int
    stop: int
    always: frozenset[int]
    sometimes: frozenset[int]


@dataclass(frozen=True)
class Table:
    """`sizes`: slots of each buffer, by name, `saved.<lane>` and `between.<lane>` by lane."""

    schedule: Schedule
    slots: tuple[Played, ...]
    ends: Ends
    sizes: Mapping[str, int]

    def played(self, slot: int) -> np.ndarray:
        """bool `[tick]`: whether any stage plays anything in this slot."""
        return (self.slots[slot].valid | self.slots[slot].fills).any(axis=1)

    def filled(self, slot: int) -> np.ndarray:
        """bool `[tick]`: whether any stage fills this slot with a W."""
        return self.slots[slot].fills.any(axis=1)

    def segments(self) -> list[Segment]:
        """The ticks cut where a slot, or the filling of one, starts or ends."""
        marks = [self.played(i) for i in range(len(self.slots))]
        marks += [self.filled(i) for i in range(len(self.slots))] + [self.ends.head != NONE]
        ticks = len(self.schedule.ticks)
        edges = {0, ticks}
        for mark in marks:
            if (at := np.flatnonzero(mark)).size:
                edges |= {int(at[0]), int(at[-1]) + 1}
        cuts = sorted(edges)
        return [self._segment(a, b) for a, b in itertools.pairwise(cuts)]

    def _segment(self, start: int, stop: int) -> Segment:
        played = {i: self.played(i)[start:stop] for i in range(len(self.slots))}
        always = frozenset(i for i, mark in played.items() if mark.all())
        return Segment(start, stop, always, frozenset(i for i, mark in played.items() if mark.any()) - always)


def lower(schedule: Schedule) -> Table:
    """The table of a schedule that `validate` accepts; one without backwards is for evaluation."""
    return _Lowering(schedule).table()


class _Lowering:
    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.when = schedule.when()
        self.sizes: dict[str, int] = {}
        kinds = {task.kind for _, task in self.when}
        self.last = Kind.W if Kind.W in kinds else Kind.B if Kind.B in kinds else Kind.F

    def table(self) -> Table:
        inputs, cotangents = self._messages(Kind.F), self._messages(Kind.B)
        lanes = sorted(set(self.schedule.lanes))
        saved = [self._kept(f"saved.{lane}", lane, Kind.F, self.last) for lane in lanes]
        between = [self._kept(f"between.{lane}", lane, Kind.B, Kind.W) for lane in lanes]
        slots = []
        for i, slot in enumerate(self.schedule.slots):
            at_lane = lanes.index(slot.lane)
            slots.append(self._played(i, inputs, cotangents, saved[at_lane], between[at_lane]))
        return Table(self.schedule, tuple(slots), self._ends(inputs, cotangents), self.sizes)

    def _blank(self, fill: int = 0) -> np.ndarray:
        return np.full((len(self.schedule.ticks), self.schedule.stages), fill, np.int32)

    def _next(self, stage: int, task: Task) -> tuple[int, Task] | None:
        """Where the result of a task goes: the same kind of task one part on, or back for a B."""
        step = 1 if task.kind == Kind.F else -1
        q = self.schedule.place[stage, task.chunk] + step
        if not 0 <= q < len(self.schedule.route):
            return None
        other, chunk = self.schedule.route[q]
        return other, Task(task.kind, task.microbatch, chunk)

    def _messages(self, kind: Kind) -> dict[tuple[int, Task], int]:
        """The slot in which each task of this kind finds its input."""
        spans = []
        for (stage, task), (tick, _) in self.when.items():
            if task.kind == kind:
                spans.append((stage, task, self._arrival(stage, task), tick))
        name = "inputs" if kind == Kind.F else "cotangents"
        found, self.sizes[name] = _color(spans)
        return found

    def _arrival(self, stage: int, task: Task) -> int:
        """The tick in which the input of a task is written."""
        q = self.schedule.place[stage, task.chunk]
        before = q - 1 if task.kind == Kind.F else q + 1
        if before < 0:
            return self.when[stage, task][0]
        if before == len(self.schedule.route):
            return self.when[stage, Task(Kind.F, task.microbatch, task.chunk)][0]
        other, chunk = self.schedule.route[before]
        sent, _ = self.when[other, Task(task.kind, task.microbatch, chunk)]
        return sent if other == stage else sent + 1

    def _kept(self, name: str, lane: int, first: Kind, last: Kind) -> dict[tuple[int, Task], int]:
        """Slots from `first` to `last` of each microbatch and chunk, and, by a task of microbatch `NONE` - tick, where
        a stage that waits may write."""
        spans: list[tuple[int, Task, int, int]] = []
        busy: dict[tuple[int, int], set[int]] = {}
        for (stage, task), (start, _) in self.when.items():
            end = self.when.get((stage, Task(last, task.microbatch, task.chunk)))
            if task.kind == first and self.schedule.lanes[task.chunk] == lane and end is not None:
                spans.append((stage, Task(first, task.microbatch, task.chunk), start, end[0]))
        found, size = _color(spans)
        for stage, task, start, end_tick in spans:
            for t in range(start, end_tick + 1):
                busy.setdefault((stage, t), set()).add(found[stage, task])
        waiting = self._waiting(lane, first) if size else []
        for stage, t in waiting:
            free = [slot for slot in range(size) if slot not in busy.get((stage, t), ())]
            found[stage, Task(first, NONE - t, 0)] = free[0] if free else size
        self.sizes[name] = max([size, *(1 + slot for slot in found.values())])
        return found

    def _waiting(self, lane: int, kind: Kind) -> Iterable[tuple[int, int]]:
        for i, slot in enumerate(self.schedule.slots):
            if slot.lane == lane and slot.kind == kind:
                for t, tick in enumerate(self.schedule.ticks):
                    if any(entries[i] is not None for entries in tick):
                        yield from ((s, t) for s, entries in enumerate(tick) if entries[i] is None)

    def _played(
        self,
        i: int,
        inputs: Mapping[tuple[int, Task], int],
        cotangents: Mapping[tuple[int, Task], int],
        saved: Mapping[tuple[int, Task], int],
        between: Mapping[tuple[int, Task], int],
    ) -> Played:
        slot = self.schedule.slots[i]
        out = {name: self._blank() for name in Played.__dataclass_fields__}
        out["arrives"], out["stays"] = self._blank(NONE), self._blank(NONE)
        reads = inputs if slot.kind == Kind.F else cotangents
        for t, tick in enumerate(self.schedule.ticks):
            for s, entries in enumerate(tick):
                task = entries[i]
                if task is None:
                    rest = Task(slot.kind, NONE - t, 0)
                    out["saved"][t, s], out["between"][t, s] = saved.get((s, rest), 0), between.get((s, rest), 0)
                    continue
                out["microbatch"][t, s], out["chunk"][t, s] = task.microbatch, task.chunk
                out["valid" if task.kind == slot.kind else "fills"][t, s] = 1
                out["saved"][t, s] = saved.get((s, Task(Kind.F, task.microbatch, task.chunk)), 0)
                out["between"][t, s] = between.get((s, Task(Kind.B, task.microbatch, task.chunk)), 0)
                if task.kind != Kind.W:
                    out["reads"][t, s] = reads[s, task]
                    self._send(out, t, s, task, reads)
        self._fetches(i, out)
        return Played(**out)

    def _send(
        self, out: dict[str, np.ndarray], t: int, stage: int, task: Task, reads: Mapping[tuple[int, Task], int]
    ) -> None:
        if (to := self._next(stage, task)) is not None:
            if to[0] == stage:
                out["stays"][t, stage] = reads[to]
            else:
                out["arrives"][t + 1, to[0]] = reads[to]
                back = self.schedule.folded and to[1].chunk % 2 == 1
                out["from_next"][t + 1, to[0]] = back if task.kind == Kind.F else not back

    def _fetches(self, i: int, out: dict[str, np.ndarray]) -> None:
        """What a slot fetches at its end: the first weights of the next slot of the same lane on the same stage."""
        lane = self.schedule.slots[i].lane
        mates = [j for j, s in enumerate(self.schedule.slots) if s.lane == lane and s.kind != Kind.W]
        for s in range(self.schedule.stages):
            order = [(t, j) for t in range(len(self.schedule.ticks)) for j in mates if self._fetching(t, j, s)]
            for (t, j), (t_next, j_next) in itertools.pairwise(order):
                if j == i:
                    task = self.schedule.ticks[t_next][s][j_next]
                    out["next_chunk"][t, s] = 0 if task is None else task.chunk
                    out["next_last"][t, s] = self.schedule.slots[j_next].kind == Kind.B

    def _fetching(self, t: int, slot: int, stage: int) -> bool:
        """Whether the stage runs this slot's layers, if only because others do."""
        task = self.schedule.ticks[t][stage][slot]
        if task is not None:
            return task.kind != Kind.W
        return any(entries[slot] is not None for entries in self.schedule.ticks[t])

    def _ends(self, inputs: Mapping[tuple[int, Task], int], cotangents: Mapping[tuple[int, Task], int]) -> Ends:
        ticks = len(self.schedule.ticks)
        out = {name: np.full(ticks, NONE if "slot" not in name else 0, np.int32) for name in Ends.__dataclass_fields__}
        (first, first_chunk), (last, last_chunk) = self.schedule.route[0], self.schedule.route[-1]
        for (stage, task), (t, _) in self.when.items():
            if (stage, task.chunk) == (first, first_chunk) and task.kind == Kind.F:
                out["embed"][t], out["embed_slot"][t] = task.microbatch, inputs[stage, task]
            if (stage, task.chunk) == (first, first_chunk) and task.kind == Kind.B:
                out["unembed"][t] = task.microbatch
            if (stage, task.chunk) == (last, last_chunk) and task.kind == Kind.F:
                out["head"][t] = task.microbatch
                back = Task(Kind.B, task.microbatch, task.chunk)
                out["head_slot"][t] = cotangents.get((stage, back), 0)
        return Ends(**out)


def _color(spans: Sequence[tuple[int, Task, int, int]]) -> tuple[dict[tuple[int, Task], int], int]:
    """Gives every `(stage, task, first tick, last tick)` a slot that no other of its stage has in between."""
    found: dict[tuple[int, Task], int] = {}
    free_from: dict[int, list[int]] = {}
    for stage, task, start, end in sorted(spans, key=lambda span: (span[2], span[3])):
        ends = free_from.setdefault(stage, [])
        slot = next((i for i, busy_until in enumerate(ends) if busy_until < start), len(ends))
        ends[slot : slot + 1] = [end]
        found[stage, task] = slot
    return found, max((len(ends) for ends in free_from.values()), default=0)
