"""The validation loss, every so many steps and at the end."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxpar.training.callbacks import Callback, Loop


class Evaluate(Callback):
    """Records `validation_loss`: the objective over every held-out row once."""

    def __init__(self, batches: Callable[[], Iterable[Mapping[str, np.ndarray]]], every: int):
        """`batches()`: this process's held-out batches, from the first one on."""
        self._batches, self._every = batches, every
        self._last = -1

    def on_step(self, loop: Loop) -> None:
        if loop.step % self._every == 0:
            self._evaluate(loop)

    def on_end(self, loop: Loop) -> None:
        if loop.finished and self._last != loop.step:
            self._evaluate(loop)

    def _evaluate(self, loop: Loop) -> None:
        loop.settle()
        self._last = loop.step
        totals = loop.run.evaluate(loop.state, self._batches())
        loop.record(loop.step, {"validation_loss": totals["loss"]})
