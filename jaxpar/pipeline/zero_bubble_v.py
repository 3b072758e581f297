"""Zero bubble in a V: each stage holds an early and a late chunk, which halves the activations held (Qi 2024, ZB-V)."""

from jaxpar.pipeline.schedule import Kind, Schedule, Slot, Task
from jaxpar.pipeline.weights import with_weights


def zero_bubble_v(stages: int, microbatches: int, fill: bool = False) -> Schedule:
    """A microbatch enters every second tick and goes down by chunk 0 and up by chunk 1, so that the first stage plays
    its last forward and can begin its backward at once. Of a step (p - 1) (F + B) is bubble.
    """
    slots = (Slot(Kind.F), Slot(Kind.B), Slot(Kind.W))
    tasks = {}
    last = 2 * stages - 1
    for j in range(microbatches):
        for stage in range(stages):
            for chunk, q in ((0, stage), (1, last - stage)):
                tasks[2 * j + q, stage, 0] = Task(Kind.F, j, chunk)
                tasks[2 * j + last + last - q, stage, 1] = Task(Kind.B, j, chunk)
    placed = with_weights(tasks, slots, stages, (0, 0), fill)
    return Schedule.from_tasks("zero_bubble_v", stages, microbatches, (0, 0), slots, placed, folded=True)
