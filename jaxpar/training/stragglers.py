"""Which process the others wait for."""

from collections.abc import Callable
from statistics import fmean

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.training.callbacks import Callback, Loop, Record

# Beyond the middle process by so much, and so large a part of the step, that somebody should know.
_FACTOR, _SHARE = 1.5, 0.1


class Stragglers(Callback):
    """Compares, every so many steps, how long each process keeps its devices waiting; for more than one process.

    Collectives make every process' steps equally long. What differs is `host_seconds`, in which a process reads rows
    and gives out work instead of waiting for its devices: the slowest there sets the pace. A slow device does not show.
    Records `slowest_process`, `slowest_over_median`, and `slowest_data_wait`, the part of the time that it waits for
    rows.
    """

    def __init__(
        self,
        every: int = 100,
        gather: Callable[[np.ndarray], np.ndarray] = multihost_utils.process_allgather,
        say: Callable[[str], None] = print,
    ):
        self._every, self._gather, self._say = every, gather, say
        self._host: list[float] = []
        self._whole: list[float] = []
        self._wait: list[float] = []

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        if "host_seconds" in record:
            self._host.append(record["host_seconds"])
            self._whole.append(record["seconds"])
            self._wait.append(record["data_wait"])

    def on_step(self, loop: Loop) -> None:
        if loop.step % self._every or not self._host:
            return
        times, waits = self._gather(np.asarray([fmean(self._host), fmean(self._wait)], np.float32)).T
        step_seconds = fmean(self._whole)
        self._host, self._whole, self._wait = [], [], []
        slowest, middle = int(times.argmax()), float(np.sort(times)[(len(times) - 1) // 2])
        factor, wait = float(times[slowest]) / max(middle, 1e-9), float(waits[slowest])
        numbers = {"slowest_process": slowest, "slowest_over_median": factor, "slowest_data_wait": wait}
        loop.record(loop.step, numbers)
        if jax.process_index() == 0 and factor > _FACTOR and times[slowest] > _SHARE * step_seconds:
            self._say(
                f"step {loop.step}: process {slowest} takes {times[slowest]:.3g} s of a step on its host "
                f"({wait * step_seconds:.3g} s of them waiting for rows), the middle process {middle:.3g} s; "
                f"the others wait for it"
            )
