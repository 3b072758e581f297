"""The validation loss of every evaluation set, every so many steps and at the end."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxpar.state import TrainState
from jaxpar.training.average import to_averaged
from jaxpar.training.callbacks import Callback, Loop, Record

Sets = Mapping[str, Iterable[Mapping[str, np.ndarray]]]


class Evaluate(Callback):
    """Records the objective over every row of each set once, and what follows from its cross entropy.

    `validation_loss`, and for a model with the term `cross_entropy` also `perplexity`, and `bits_per_byte` for a set
    that knows its `bytes_per_target`, are those of the first set. With several sets each has them under
    `validation_loss/<name>` and so on as well. Where the optimizer keeps an average of the parameters, it is what is
    evaluated.
    """

    def __init__(self, sets: Callable[[], Sets], every: int):
        """`sets()`: this process's batches of each set by name, from the first batch on."""
        self._sets, self._every = sets, every
        self._last = -1
        self._averaged: Callable[[TrainState], TrainState] = lambda state: state

    def on_start(self, loop: Loop) -> None:
        self._averaged = to_averaged(loop.run)

    def on_step(self, loop: Loop) -> None:
        if loop.step % self._every == 0:
            self._evaluate(loop)

    def on_end(self, loop: Loop) -> None:
        if loop.finished and self._last != loop.step:
            self._evaluate(loop)

    def _evaluate(self, loop: Loop) -> None:
        loop.settle()
        self._last = loop.step
        record: dict[str, float] = {}
        sets, state = self._sets(), self._averaged(loop.state)
        for name, batches in sets.items():
            totals = loop.run.evaluate(state, batches)
            numbers = metrics(totals, getattr(batches, "bytes_per_target", None))
            if not record:
                record |= numbers
            if len(sets) > 1:
                record |= {f"{metric}/{name}": value for metric, value in numbers.items()}
        loop.record(loop.step, record)


def metrics(totals: Record, bytes_per_target: float | None) -> dict[str, float]:
    """From the totals of an evaluation, in nats per target, and the bytes of text for each target."""
    found = {"validation_loss": totals["loss"]}
    if "cross_entropy" not in totals:
        return found
    nats = totals["cross_entropy"]
    found["perplexity"] = math.exp(nats) if nats < 700 else math.inf
    if bytes_per_target is not None:
        found["bits_per_byte"] = nats / math.log(2) / bytes_per_target
    return found
