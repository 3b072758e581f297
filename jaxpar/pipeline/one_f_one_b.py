"""1F1B: a backward begins as soon as its forward has ended, and every stage holds few microbatches (Narayanan 2021)."""

from jaxpar.pipeline.schedule import Kind, Schedule, Slot, Task


def one_f_one_b(stages: int, microbatches: int, lanes: int = 1) -> Schedule:
    """`F(j)` at the `q`-th place of the route in tick `j + q`; the last place plays `B(j)` in the tick of `F(j)`.

    Bubble (p - 1) / m. With one lane, stage `s` holds 2 (p - 1 - s) + 1 microbatches. `lanes`: stacks of layers that
    follow each other, each spread over all stages.
    """
    slots = (*(Slot(Kind.F, k) for k in range(lanes)), *(Slot(Kind.B, k) for k in reversed(range(lanes))))
    tasks = joined(stages, microbatches, lanes)
    return Schedule.from_tasks("1f1b", stages, microbatches, tuple(range(lanes)), slots, tasks)


def joined(stages: int, microbatches: int, lanes: int, pause: int = 0) -> dict[tuple[int, int, int], Task]:
    """F and B of every chunk, one chunk in a lane; the last place's first B `pause` ticks after its first F.

    The slots must begin with F of the lanes in order and B of the lanes in reverse. On one stage nothing travels, and
    a microbatch goes through all lanes in one tick.
    """
    tasks = {}
    step = 1 if stages > 1 else 0
    last = step * (lanes * stages - 1)
    for j in range(microbatches):
        for lane in range(lanes):
            for stage in range(stages):
                q = step * (lane * stages + stage)
                tasks[j + q, stage, lane] = Task(Kind.F, j, lane)
                tasks[last + pause + j + last - q, stage, 2 * lanes - 1 - lane] = Task(Kind.B, j, lane)
    return tasks
