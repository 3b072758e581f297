"""Evaluation over ragged batches: every row once, on any number of devices and processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.axis_rules import next_multiple
from jaxpar.errors import BatchError
from jaxpar.executor.region import Sums

HostBatch = Mapping[str, np.ndarray]


def even_batches(
    batches: Iterable[HostBatch], shards: int, check: Callable[[HostBatch], None], givers: Sequence[int] = (0,)
) -> Iterator[tuple[HostBatch, np.ndarray, int]]:
    """-> batches filled up to a multiple of `shards` rows, float32[rows] 1.0 for real rows, real rows of all processes.

    Every process goes on until the last one has no rows left, so that all of them enter the same programs. `givers`:
    the processes whose rows count; the others give the same rows as one of them.
    """
    iterator = iter(batches)
    last: HostBatch | None = None
    while True:
        batch = next(iterator, None)
        if batch is not None:
            check(batch)
            last = batch
        have = 0 if batch is None else len(next(iter(batch.values())))
        counts = _all_counts(have)
        if max(counts) == 0:
            return
        if last is None:
            raise BatchError("this process has no rows to evaluate while others have; give every process at least one")
        size = next_multiple(max(counts), shards)
        valid = (np.arange(size) < have).astype(np.float32)
        rows = sum(counts[process] for process in givers)
        yield {name: _fill(x, have, size) for name, x in last.items()}, valid, rows


def _all_counts(have: int) -> list[int]:
    if jax.process_count() == 1:
        return [have]
    return [int(n) for n in np.ravel(multihost_utils.process_allgather(np.asarray(have)))]


def _fill(x: np.ndarray, have: int, size: int) -> np.ndarray:
    """The first `have` rows of `x`, then its first row, if it has any, again and again."""
    if len(x) == 0:
        return np.zeros((size, *x.shape[1:]), x.dtype)
    return np.asarray(x)[np.where(np.arange(size) < have, np.arange(size), 0)]


@dataclass
class EvaluationSums:
    """Sums on the devices, divided once at the end, on the host in float64."""

    _parts: list[Sums] = field(default_factory=list)
    _rows: int = 0

    def add(self, sums: Sums, rows: int) -> None:
        self._parts.append(sums)
        self._rows += rows

    def result(self) -> dict[str, float]:
        if not self._parts:
            raise BatchError("nothing to evaluate: there was no batch; give at least one row")
        parts: list[Any] = jax.device_get(self._parts)
        out: dict[str, float] = {"loss": 0.0}
        for name, coef in parts[0].coefs.items():
            total, weight = (
                sum(float(d[name]) for d in side) for side in zip(*((p.totals, p.weights) for p in parts), strict=True)
            )
            out[name] = total / weight if weight else 0.0
            out[f"weight/{name}"] = weight
            out["loss"] += float(coef) * out[name]
        return out | {"rows": float(self._rows)}
