"""The loop: batches into steps, numbers out of them, until the end or a signal."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxpar.batch import local_positions
from jaxpar.errors import ConfigError, TrainingError
from jaxpar.estimate.compile import StepReport, report
from jaxpar.run import Run
from jaxpar.state import TrainState
from jaxpar.training.callbacks import Callback, Data, Loop
from jaxpar.training.interrupts import Interrupts


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how often.

    Attributes:
      steps: of the whole run, those before a resume included.
      evaluate_every: steps between evaluations; there is always one at the end.
      checkpoint_every: steps between checkpoints; there is always one at the end.
      keep_checkpoints: how many stay on disk.
      max_skips: steps in a row that may be skipped because their loss or gradient is not finite.
      seed: of the parameters and of dropout.
    """

    steps: int = 1000
    evaluate_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    max_skips: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "evaluate_every", "checkpoint_every", "keep_checkpoints", "max_skips")
        wrong = [
            f"{name} must be at least 1, found {getattr(self, name)}" for name in counts if getattr(self, name) < 1
        ]
        if wrong:
            raise ConfigError("trainer: " + "; ".join(wrong))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its state, and the signal that ended it, if one did."""

    state: TrainState
    step: int
    signal: int | None


def train(
    run: Run, state: TrainState, data: Data, steps: int, callbacks: Sequence[Callback] = (), max_skips: int = 20
) -> Outcome:
    """Trains from `state`, which is donated, to step `steps`, or to the end of the step in which a signal comes.

    The devices are never waited for: a step's numbers are fetched when the next one is under way. Raises
    `TrainingError` after `max_skips` skipped steps in a row.
    """
    loop = Loop(run, data, steps, callbacks, state, int(state.step))
    meter, step = Meter(loop, max_skips), None
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.close)
        interrupts = stack.enter_context(Interrupts())
        for callback in callbacks:
            callback.on_start(loop)
        while not loop.finished and interrupts.signal is None:
            batch = run.put(next(data))
            if step is None:
                step, loop.report = compile_step(run, batch)
            meter.starts()
            loop.state, metrics = step(loop.state, batch)
            loop.step += 1
            meter.started(metrics, batch)
            for callback in callbacks:
                callback.on_step(loop)
        meter.finish()
        for callback in callbacks:
            callback.on_end(loop)
    return Outcome(loop.state, loop.step, interrupts.signal)


def compile_step(run: Run, batch: Mapping[str, Any]) -> tuple[Any, StepReport]:
    """The step compiled, once, for batches of this shape, and what it takes."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    started = time.perf_counter()
    compiled = run.lower(shapes).compile()
    seconds = time.perf_counter() - started
    return compiled, replace(report(compiled, run.mesh), compile_seconds=seconds)


class Meter:
    """Fetches the numbers of steps, one step late, and times them."""

    def __init__(self, loop: Loop, max_skips: int):
        self._loop, self._max_skips, self._skips = loop, max_skips, 0
        self._pending: deque[tuple[int, Mapping[str, Array], int]] = deque()
        self._clock = 0.0
        loop.settle = self.finish

    def starts(self) -> None:
        """A step is about to be given to the devices."""
        if not self._pending:
            self._clock = time.perf_counter()

    def started(self, metrics: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
        tokens = len(next(iter(batch.values()))) * (local_positions(self._loop.run.batch_axes, batch) or 1)
        self._pending.append((self._loop.step, metrics, tokens))
        if len(self._pending) > 1:
            self._fetch()

    def finish(self) -> None:
        """Waits for what is under way."""
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        step, metrics, tokens = self._pending.popleft()
        values = {name: float(np.asarray(x)) for name, x in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        values["tokens_per_second"] = tokens / seconds
        if self._loop.report is not None:
            values["tflops_per_device"] = self._loop.report.flops / seconds / 1e12
        self._loop.record(step, values)
        self._count_skips(step, bool(values["skipped"]))

    def _count_skips(self, step: int, skipped: bool) -> None:
        self._skips = self._skips + 1 if skipped else 0
        if self._skips >= self._max_skips:
            raise TrainingError(
                f"the last {self._skips} steps, up to step {step}, were all skipped: their loss or gradient was not "
                f"finite, or no token counted, and nothing was learned. Start again from the last checkpoint with a "
                f"lower learning rate, or look for bad rows in the data; max_skips={self._max_skips} sets the limit"
            )
