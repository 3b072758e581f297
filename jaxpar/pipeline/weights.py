"""Where the weights' gradients of a split backward are played: in all stages at once, or in slots left idle."""

from collections import deque
from collections.abc import Mapping
from itertools import accumulate

from jaxpar.pipeline.schedule import Kind, Slot, Task

Tasks = Mapping[tuple[int, int, int], Task]


def with_weights(tasks: Tasks, slots: tuple[Slot, ...], stages: int, lanes: tuple[int, ...], fill: bool) -> Tasks:
    """`tasks` (F and B) and every W: as early as all stages have one to play, so that none waits in a W slot.

    `fill`: as many as possible in slots that are idle while other stages play an F or a B there, the same number on
    every stage.
    """
    added = dict(tasks)
    for lane in sorted(set(lanes)):
        added |= _Lane(tasks, slots, stages, lanes, lane).weights(fill)
    return added


class _Lane:
    """The slots of one lane. Time is counted in slots: `tick * len(slots) + slot`."""

    def __init__(self, tasks: Tasks, slots: tuple[Slot, ...], stages: int, lanes: tuple[int, ...], lane: int):
        self.width, self.stages = len(slots), stages
        self.weight_slot = slots.index(Slot(Kind.W, lane))
        mine = [(where, task) for where, task in sorted(tasks.items()) if lanes[task.chunk] == lane]
        self.backwards: list[list[tuple[int, Task]]] = [[] for _ in range(stages)]
        for (t, stage, slot), task in mine:
            if task.kind == Kind.B:
                weight = Task(Kind.W, task.microbatch, task.chunk)
                self.backwards[stage].append((t * self.width + slot, weight))
        self.count = len(self.backwards[0])
        used = sorted({(t, slot) for (t, _, slot), _ in mine})
        self.idle = [[t * self.width + i for t, i in used if (t, s, i) not in tasks] for s in range(stages)]
        # Enough ticks after the last B for every W.
        self.ticks = 1 + max(t for (t, _, _), _ in mine) + self.count

    def weights(self, fill: bool) -> dict[tuple[int, int, int], Task]:
        """Every W of this lane, by tick, stage and slot."""
        most = min(map(len, self.idle)) if fill else 0
        filled, opened = next(found for n in range(most, -1, -1) if (found := self._times(n)))
        placed = {}
        for stage in range(self.stages):
            # The oldest first; `_times` has left time for each.
            waiting = deque(task for _, task in self.backwards[stage])
            for time in sorted(filled[stage] + opened):
                placed[time // self.width, stage, time % self.width] = waiting.popleft()
        return placed

    def _times(self, filled: int) -> tuple[list[list[int]], list[int]] | None:
        """By stage the `filled` last idle slots, and the W slots that all stages play; None if time is too short."""
        fills = [idle[len(idle) - filled :] for idle in self.idle]
        room = [self.count] * (self.ticks * self.width)
        for stage in range(self.stages):
            change = [0] * len(room)
            for time, _ in self.backwards[stage]:
                change[time] += 1
            for time in fills[stage]:
                change[time] -= 1
            room = list(map(min, room, accumulate(change)))
        # A W now takes from what is there later.
        room = list(accumulate(reversed(room), min))[::-1]
        opened: list[int] = []
        for time in range(self.weight_slot, self.ticks * self.width, self.width):
            if len(opened) < room[time]:
                opened.append(time)
        enough = min(room) >= 0 and len(opened) == self.count - filled
        return (fills, opened) if enough else None
