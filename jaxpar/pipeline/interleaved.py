"""Interleaved 1F1B: a stage holds `v` chunks of layers, and the pipeline fills in 1/v of the time (Narayanan 2021)."""

from collections.abc import Iterator

from jaxpar.pipeline.schedule import Kind, Schedule, Slot, Task


def interleaved(stages: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Groups of at least p microbatches go through one chunk after the other.

    Bubble (p - 1) / (m v), for any m >= p: where p does not divide m, some groups are larger. With m < p a chunk waits
    for the one before, which adds (v - 1) (p - m) / (m v).
    """
    last_chunk = virtual_stages - 1
    order = list(stream(stages, microbatches, virtual_stages))
    first_backward = stages - 1 + min(n for n, _, chunk in order if chunk == last_chunk)
    tasks = {}
    for n, j, chunk in order:
        for stage in range(stages):
            tasks[stage + n, stage, 0] = Task(Kind.F, j, chunk)
            tasks[first_backward + n + stages - 1 - stage, stage, 1] = Task(Kind.B, j, last_chunk - chunk)
    slots = (Slot(Kind.F), Slot(Kind.B))
    return Schedule.from_tasks("interleaved", stages, microbatches, (0,) * virtual_stages, slots, tasks)


def stream(stages: int, microbatches: int, virtual_stages: int) -> Iterator[tuple[int, int, int]]:
    """`(n, microbatch, chunk)`: which forward a stage plays `n` ticks after its first tick."""
    start = n = 0
    for size in group_sizes(stages, microbatches):
        for chunk in range(virtual_stages):
            yield from ((n + i, start + i, chunk) for i in range(size))
            # A microbatch is back on the first stage after p ticks: a group must last as long.
            n += max(size, stages)
        start += size


def group_sizes(stages: int, microbatches: int) -> list[int]:
    """As equal as can be and at least p, if there are as many; the larger ones first, since the backwards follow the
    first group's forwards at a distance that must do for all groups."""
    groups = max(microbatches // stages, 1)
    return [microbatches // groups + (g < microbatches % groups) for g in range(groups)]
