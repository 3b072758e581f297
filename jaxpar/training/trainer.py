"""The loop: batches into steps, numbers out of them, until the end or a signal."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxpar.errors import ConfigError
from jaxpar.estimate.compile import StepReport, report
from jaxpar.run import Run
from jaxpar.state import TrainState
from jaxpar.training.batch_warmup import BatchStages, BatchWarmup, Stage
from jaxpar.training.callbacks import Callback, Data, Loop
from jaxpar.training.interrupts import Interrupts
from jaxpar.training.meter import Known, Meter


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how often.

    Attributes:
      steps: of the whole run, those before a resume included.
      evaluate_every: steps between evaluations; there is always one at the end.
      checkpoint_every: steps between checkpoints; there is always one at the end.
      keep_checkpoints: how many stay on disk.
      keep_best: one more, that of the lowest validation loss, in the folder `best`.
      guard_every: steps between comparisons of replicas, bit for bit (see `Guard`); 0: never.
      max_skips: steps in a row that may be skipped because their loss or gradient is not finite.
      seed: of the parameters and of dropout.
      batch_warmup: fewer rows per step in the first updates.
    """

    steps: int = 1000
    evaluate_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    keep_best: bool = False
    guard_every: int = 100
    max_skips: int = 20
    seed: int = 0
    batch_warmup: BatchWarmup = field(default_factory=BatchWarmup)

    def __post_init__(self) -> None:
        counts = ("steps", "evaluate_every", "checkpoint_every", "keep_checkpoints", "max_skips")
        wrong = [
            f"{name} must be at least 1, found {getattr(self, name)}" for name in counts if getattr(self, name) < 1
        ]
        if self.guard_every < 0:
            wrong.append(f"guard_every must be 0 (never) or more, found {self.guard_every}")
        if wrong:
            raise ConfigError("trainer: " + "; ".join(wrong))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its state, and the signal that ended it, if one did."""

    state: TrainState
    step: int
    signal: int | None


def train(
    run: Run,
    state: TrainState,
    data: Data,
    steps: int,
    callbacks: Sequence[Callback] = (),
    max_skips: int = 20,
    known: Known | None = None,
    stages: Sequence[Stage] = (),
) -> Outcome:
    """Trains from `state`, which is donated, to step `steps`, or to the end of the step in which a signal comes.

    The devices are never waited for: a step's numbers (see `Meter`) are fetched when the next one is under way.
    `stages`: of a batch-size warm-up (see `batch_stages`). Raises `TrainingError` after `max_skips` skipped steps in a
    row.
    """
    loop = Loop(run, data, steps, callbacks, state, int(state.step))
    meter, step = Meter(loop, max_skips, known or Known()), None
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.close)
        interrupts = stack.enter_context(Interrupts())
        for callback in callbacks:
            callback.on_start(loop)
        stage = BatchStages(loop, stages)
        while not loop.finished and interrupts.signal is None:
            if stage.turn():
                step = None
            with meter.waits():
                rows = next(data)
            batch = stage.run.put(rows)
            if step is None:
                step, loop.report = compile_step(stage.run, batch)
            meter.starts()
            with jax.profiler.StepTraceAnnotation("train", step_num=loop.step + 1):
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
