"""Plays a schedule tick by tick by the rules alone: what `Schedule.validate` is compared with."""

from collections.abc import Iterable, Mapping

from jaxpar.pipeline import Kind, Schedule, Task


def playable(schedule: Schedule) -> bool:
    """Whether every task is played once, when what it needs is there."""
    p = schedule.stages
    done: set[tuple[int, Kind, int, int]] = set()  # place in the route, kind, microbatch, chunk
    for tick in schedule.ticks:
        arrived = set(done)  # what a neighbour sends arrives before the next tick, what stays is there at once
        for i, slot in enumerate(schedule.slots):
            for stage in range(p):
                task = tick[stage][i]
                if task is None:
                    continue
                chunk, m = task.chunk, task.microbatch
                if task.kind not in (slot.kind, Kind.W) or task.kind not in schedule.kinds:
                    return False
                if not (0 <= chunk < schedule.chunks and 0 <= m < schedule.microbatches):
                    return False
                turned = schedule.folded and chunk % 2 == 1
                q = chunk * p + (p - 1 - stage if turned else stage)
                chunk_of = {q + step: (q + step) // p for step in (-1, 1)}
                stage_of = {n: p - 1 - n % p if schedule.folded and c % 2 else n % p for n, c in chunk_of.items()}
                there = {n: done if s == stage else arrived for n, s in stage_of.items()}
                needs = {
                    Kind.F: q == 0 or (q - 1, Kind.F, m, chunk_of[q - 1]) in there[q - 1],
                    Kind.B: (q, Kind.F, m, chunk) in done
                    and (q == p * schedule.chunks - 1 or (q + 1, Kind.B, m, chunk_of[q + 1]) in there[q + 1]),
                    Kind.W: (q, Kind.B, m, chunk) in done,
                }
                me = (q, task.kind, m, chunk)
                if not needs[task.kind] or me in done or schedule.lanes[chunk] != slot.lane:
                    return False
                done.add(me)
    return len(done) == p * schedule.chunks * schedule.microbatches * len(schedule.kinds)


Orders = Mapping[int, list[Task]]


def orders(schedule: Schedule) -> dict[int, list[Task]]:
    """By stage: its tasks in the order of time."""
    found: dict[int, list[Task]] = {stage: [] for stage in range(schedule.stages)}
    for _, stage, _, task in schedule.entries():
        found[stage].append(task)
    return found


def asynchronous_time(tasks: Orders, chunks: int, forward: float, backward: float) -> float:
    """How long the stages take if each plays its next task as soon as what it needs has ended."""
    p, left = len(tasks), {stage: list(order) for stage, order in tasks.items()}
    ended: dict[tuple[int, Kind, int], float] = {}
    free = dict.fromkeys(tasks, 0.0)
    while any(left.values()):
        for stage, waiting in left.items():
            if not waiting:
                continue
            task = waiting[0]
            q, last = task.chunk * p + stage, p * chunks - 1
            needs = [(q - 1, Kind.F)] if task.kind == Kind.F else [(q, Kind.F), (q + 1, Kind.B)]
            starts = [ended.get((at, kind, task.microbatch)) for at, kind in needs if 0 <= at <= last]
            if None not in starts:
                begin = max([free[stage], *(t for t in starts if t is not None)])
                free[stage] = begin + (forward if task.kind == Kind.F else backward) / chunks
                ended[q, task.kind, task.microbatch] = free[stage]
                waiting.pop(0)
    return max(free.values())


def most_held(order: Iterable[Task]) -> int:
    """The most forwards of a stage whose backward has not ended."""
    held = most = 0
    for task in order:
        held += 1 if task.kind == Kind.F else 0
        most = max(most, held)
        held -= 1 if task.kind == Kind.B else 0
    return most
