"""Forward-only schedules, for evaluation: the forwards of a training schedule without what comes after."""

from jaxpar.errors import PlanError
from jaxpar.pipeline.build import legal_microbatches
from jaxpar.pipeline.interleaved import stream
from jaxpar.pipeline.schedule import Kind, Schedule, Slot, Task


def forward(
    stages: int, microbatches: int, virtual_stages: int = 1, *, lanes: int = 1, folded: bool = False
) -> Schedule:
    """F tasks alone, validated, for layers placed as for 1F1B (`lanes`), interleaved (`virtual_stages`) or
    zero-bubble-V (`folded`, 2 virtual stages). Any microbatch count from 1; raises `PlanError` for what no schedule
    has.
    """
    name = "zero_bubble_v" if folded else "interleaved" if virtual_stages > 1 else "1f1b"
    if microbatches not in legal_microbatches(name, stages, virtual_stages, lanes=lanes):
        raise PlanError(f"a forward needs at least 1 microbatch, found {microbatches}")
    chunks = 2 if folded else virtual_stages
    starts: dict[tuple[int, int, int], Task] = {}
    for j in range(microbatches if folded else 0):
        for stage in range(stages):
            starts[2 * j + stage, stage, 0] = Task(Kind.F, j, 0)
            starts[2 * j + 2 * stages - 1 - stage, stage, 0] = Task(Kind.F, j, 1)
    for n, j, chunk in () if folded else stream(stages, microbatches, virtual_stages):
        for stage in range(stages):
            for lane in range(lanes):
                starts[n + (lane * stages + stage if stages > 1 else 0), stage, lane] = Task(
                    Kind.F, j, chunk if lanes == 1 else lane
                )
    slots = tuple(Slot(Kind.F, lane) for lane in range(lanes))
    own = tuple(range(lanes)) if lanes > 1 else (0,) * chunks
    schedule = Schedule.from_tasks("forward", stages, microbatches, own, slots, starts, folded)
    schedule.validate()
    return schedule
