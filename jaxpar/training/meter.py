"""The numbers of each step: fetched one step late, timed, and set against what the devices could do."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from jaxpar.batch import local_positions
from jaxpar.errors import TrainingError
from jaxpar.training.callbacks import Loop
from jaxpar.training.flops import model_flops_per_token, peak_flops


@dataclass(frozen=True)
class Known:
    """What the meter cannot see in a program.

    Attributes:
      learning_rates: of each optimizer update, counted from 0; a skipped step is none.
      experts_per_token: of a mixture of experts.
    """

    learning_rates: Sequence[float] | np.ndarray = ()
    experts_per_token: int | None = None


class Meter:
    """Fetches the numbers of steps and adds to each record, where it can be known:

    `seconds`, `rows` (of all replicas), `tokens_per_second`, `tokens_per_second_per_device`, `tflops_per_device` (dot
    FLOPs that the program executes), `mfu` (model FLOPs by formula over the device's peak), `learning_rate`,
    `data_wait` (the part of the time that the host waited for rows) and `host_seconds` (in which it did not wait for
    the devices).
    """

    def __init__(self, loop: Loop, max_skips: int, known: Known):
        self._loop, self._max_skips, self._skips, self._known = loop, max_skips, 0, known
        self._pending: deque[tuple[int, Mapping[str, Array], int, int | None]] = deque()
        self._clock, self._waited = 0.0, 0.0
        self._updates = loop.step - int(loop.state.skipped)
        loop.settle = self.finish

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Around the wait for rows."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def starts(self) -> None:
        """A step is about to be given to the devices."""
        if not self._pending:
            self._clock, self._waited = time.perf_counter(), 0.0

    def started(self, metrics: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
        length = local_positions(self._loop.run.batch_axes, batch)
        self._pending.append((self._loop.step, metrics, len(next(iter(batch.values()))), length))
        if len(self._pending) > 1:
            self._fetch()

    def finish(self) -> None:
        """Waits for what is under way."""
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        step, metrics, rows, length = self._pending.popleft()
        asked = time.perf_counter()
        values = {name: float(np.asarray(x)) for name, x in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, blocked = now - self._clock, now - asked
        values |= {"seconds": seconds, "host_seconds": seconds - blocked, "data_wait": self._waited / seconds}
        self._clock, self._waited = now, 0.0
        values |= self._speed(rows, length, seconds) | self._learning_rate()
        skipped = bool(values["skipped"])
        self._updates += not skipped
        self._loop.record(step, values)
        self._count_skips(step, skipped)

    def _speed(self, rows: int, length: int | None, seconds: float) -> dict[str, float]:
        run, devices = self._loop.run, self._loop.run.mesh.size
        tokens = rows * (length or 1)
        found = {"rows": float(rows), "tokens_per_second": tokens / seconds}
        found["tokens_per_second_per_device"] = tokens / seconds / devices
        if self._loop.report is not None:
            found["tflops_per_device"] = self._loop.report.flops / seconds / 1e12
        peak = peak_flops(run.mesh.devices.flat[0].device_kind, run.plan.compute_dtype)
        if peak is not None and length is not None:
            each = model_flops_per_token(run.structure, length, self._known.experts_per_token)
            if each is not None:
                found["mfu"] = each * tokens / seconds / devices / peak
        return found

    def _learning_rate(self) -> dict[str, float]:
        """The rate of the update that a step made, or that it would have made."""
        rates = self._known.learning_rates
        return {"learning_rate": float(rates[self._updates])} if self._updates < len(rates) else {}

    def _count_skips(self, step: int, skipped: bool) -> None:
        self._skips = self._skips + 1 if skipped else 0
        if self._skips >= self._max_skips:
            raise TrainingError(
                f"the last {self._skips} steps, up to step {step}, were all skipped: their loss or gradient was not "
                f"finite, or no token counted, and nothing was learned. Start again from the last checkpoint with a "
                f"lower learning rate, or look for bad rows in the data; max_skips={self._max_skips} sets the limit"
            )
