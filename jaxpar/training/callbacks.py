"""What happens beside the steps of a run: the hooks, and what they see."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpar.estimate.compile import StepReport
from jaxpar.run import Run
from jaxpar.state import TrainState

Record = Mapping[str, float]


class Data(Iterator[Mapping[str, np.ndarray]], Protocol):
    """Endless batches of this process's rows, with a position that JSON holds."""

    def get_state(self) -> dict[str, Any]: ...
    def resize(self, batch_rows: int) -> None: ...


class Callback:
    """Hooks that do nothing. Every process calls them all, in the order of the list."""

    def on_start(self, loop: "Loop") -> None:
        """Before the first step."""

    def on_record(self, loop: "Loop", step: int, record: Record) -> None:
        """Numbers of `step`, on the host: a step's come one step late, an evaluation's at once."""

    def on_step(self, loop: "Loop") -> None:
        """After a step was given to the devices; its numbers are not there yet."""

    def on_end(self, loop: "Loop") -> None:
        """After the last step, or after the one that a signal ended; not after an error."""

    def close(self) -> None:
        """Always called, after an error too."""


@dataclass
class Loop:
    """Where a run is.

    Attributes:
      step: batches consumed, those of earlier starts included.
      steps: where the run ends.
      report: of the compiled step, once it is compiled.
      settle: waits for the steps under way and records their numbers; to be called before work that takes time,
        which would else be counted as theirs.
    """

    run: Run
    data: Data
    steps: int
    callbacks: Sequence[Callback]
    state: TrainState
    step: int
    report: StepReport | None = None
    settle: Callable[[], None] = lambda: None

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def record(self, step: int, record: Record) -> None:
        """Tells every callback."""
        for callback in self.callbacks:
            callback.on_record(self, step, record)
