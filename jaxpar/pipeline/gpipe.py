"""GPipe: all forwards, then all backwards (Huang 2019)."""

from jaxpar.pipeline.one_f_one_b import joined
from jaxpar.pipeline.schedule import Kind, Schedule, Slot


def gpipe(stages: int, microbatches: int, lanes: int = 1) -> Schedule:
    """The first B is played in the tick after the last F.

    Bubble (p - 1) / m, the same as 1F1B's; every stage holds all m microbatches. `lanes`: stacks of layers that follow
    each other, each spread over all stages.
    """
    slots = (*(Slot(Kind.F, k) for k in range(lanes)), *(Slot(Kind.B, k) for k in reversed(range(lanes))))
    tasks = joined(stages, microbatches, lanes, pause=microbatches)
    return Schedule.from_tasks("gpipe", stages, microbatches, tuple(range(lanes)), slots, tasks)
