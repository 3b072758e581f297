"""Times the best candidates on the devices at hand, and keeps what that teaches."""

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.planner.calibration import Calibration, Sample
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked
from jaxpar.planner.search import Progress, Search
from jaxpar.program import Program

STEPS = 5


def measure(
    ranked: Ranked, count: int, calibration: Calibration | None = None, progress: Progress = lambda what, done, of: None
) -> tuple[Ranked, Calibration]:
    """Runs `count` steps' plans, the best first, and searches again with what was learned.

    The measured candidates keep their measured seconds, and lead. Raises `ConfigError` where the cluster of the search
    is not the devices at hand, and what a run raises.
    """
    q = ranked.question
    devices = jax.devices()
    if len(devices) != q.cluster.size:
        raise ConfigError(f"to measure on {q.cluster} it must be here: found {len(devices)} {devices[0].device_kind}")
    plain = Search(replace(q, calibration=None))
    samples, measured = [], {}
    for i, candidate in enumerate(_unlike(ranked, count)):
        progress("measuring", i, count)
        seconds = time_step(q.build, q.optimizer, candidate, q.batch_axes, q.shapes)
        measured[candidate.plan] = seconds
        samples.append(Sample.of(str(candidate.plan), plain.evaluate(candidate.plan).time, seconds))
    progress("measuring", count, count)
    learned = (calibration or Calibration(q.cluster.kind)).with_samples(samples)
    again = Search(replace(q, calibration=learned)).run()
    ours = [replace(c, measured=measured[c.plan]) for c in map(Search(again.question).evaluate, measured)]
    others = [c for c in again.found if c.plan not in measured]
    found = sorted((*ours, *others), key=lambda c: c.seconds)
    return replace(again, found=tuple(found), dropped=ranked.dropped), learned


def _unlike(ranked: Ranked, count: int) -> list[Candidate]:
    """The best ones, of each mesh and ZeRO stage one: twins teach nothing."""
    kinds = {(c.plan.mesh, c.plan.zero, c.plan.pipeline): c for c in reversed(ranked.found)}
    return sorted(kinds.values(), key=lambda c: c.time.total)[:count]


def time_step(
    build: Any, optimizer: Any, candidate: Candidate, batch_axes: Any, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> float:
    """Seconds of a step: the median of a few, after one that compiles."""
    run = Program(build, optimizer, candidate.plan, batch_axes).on()
    batch = run.put({name: _filled(name, x) for name, x in shapes.items()})
    state, metrics = run.step(run.init(seed=0), batch)
    jax.block_until_ready(metrics)
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        state, metrics = run.step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _filled(name: str, x: jax.ShapeDtypeStruct) -> np.ndarray:
    """Token 0 everywhere, weights 1, positions in order."""
    if name == "positions":
        return np.broadcast_to(np.arange(x.shape[1], dtype=x.dtype), x.shape)
    return np.full(x.shape, 1 if np.issubdtype(x.dtype, np.floating) else 0, x.dtype)
