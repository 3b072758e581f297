"""What the devices do in a few steps: a trace for TensorBoard's profiler and for Perfetto, and a memory profile."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxpar.errors import ConfigError
from jaxpar.training.callbacks import Callback, Loop


@dataclass(frozen=True)
class ProfiledSteps:
    """Steps `first` to `last`, both included, counted as the step line counts them."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "ProfiledSteps":
        """`10:13`. Raises `ConfigError` for any other form."""
        first, separator, last = text.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal()) or not 2 <= int(first) <= int(last):
            raise ConfigError(
                f"profile {text!r}: needs FIRST:LAST, the first and the last step to trace, such as 10:13; FIRST is 2 "
                f"or more, and LAST not before it"
            )
        return cls(int(first), int(last))


class Profile(Callback):
    """Traces these steps into the run's folder. On one process alone: its devices stand for all.

    `tensorboard --logdir` of the folder shows it under Profile (with the package xprof), and ui.perfetto.dev opens the
    `perfetto_trace.json.gz` in it. At the end of the last step what lies in the devices' memory goes to
    `memory-<step>.prof`, for pprof.
    """

    def __init__(self, directory: Path, steps: ProfiledSteps, say: Callable[[str], None] = print):
        self._directory, self._steps, self._say, self._tracing = directory, steps, say, False

    def on_start(self, loop: Loop) -> None:
        earliest, steps = loop.step + 2, self._steps
        if steps.first < earliest or steps.last > loop.steps:
            raise ConfigError(
                f"profile {steps.first}:{steps.last}: this start goes from step {loop.step + 1} to {loop.steps}, and "
                f"its first step compiles; choose steps from {earliest} to {loop.steps}"
            )

    def on_step(self, loop: Loop) -> None:
        if loop.step == self._steps.first - 1:
            loop.settle()
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._tracing = True
        elif loop.step == self._steps.last:
            loop.settle()
            self._stop()
            jax.profiler.save_device_memory_profile(str(self._directory / f"memory-{loop.step}.prof"))
            self._say(f"traced steps {self._steps.first} to {self._steps.last} into {self._directory}/plugins/profile/")

    def close(self) -> None:
        if self._tracing:
            self._stop()

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
