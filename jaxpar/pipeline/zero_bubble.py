"""Zero bubble: the backward of the input goes ahead alone, that of the weights fills the gaps (Qi 2024, ZB-H1)."""

from jaxpar.pipeline.one_f_one_b import joined
from jaxpar.pipeline.schedule import Kind, Schedule, Slot
from jaxpar.pipeline.weights import with_weights


def zero_bubble(stages: int, microbatches: int, lanes: int = 1, fill: bool = False) -> Schedule:
    """1F1B with a split backward. No stage waits in a W slot: of a step (p - 1) (F + B) is bubble.

    `fill`: every stage plays p - 1 of its W in F and B slots that the end of the pipeline leaves idle, and the bubble
    is (p - 1) (F + B - W); needs 2 p lanes - 1 microbatches. `lanes`: stacks of layers that follow each other.
    """
    slots = (
        *(Slot(Kind.F, k) for k in range(lanes)),
        *(Slot(Kind.B, k) for k in reversed(range(lanes))),
        *(Slot(Kind.W, k) for k in reversed(range(lanes))),
    )
    own = tuple(range(lanes))
    tasks = joined(stages, microbatches, lanes)
    placed = with_weights(tasks, slots, stages, own, fill)
    return Schedule.from_tasks("zero_bubble", stages, microbatches, own, slots, placed)
