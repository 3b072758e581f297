"""How far a cell of the parity table of sequence parallelism is from one device."""

from functools import lru_cache

import numpy as np
import optax

from experiments.sequence_table import CASES, Cell, batch
from jaxpar import Plan, Program
from jaxpar.testing import parity


def share(cell: Cell) -> float:
    """The largest error over batches and leaves, as a share of what is allowed."""
    run = parity.run_on_enough_devices(cell.program)
    state, case, found = run.init(0), CASES[cell.case], []
    for kind in case.kinds:
        right = reference(cell.case, kind, "float32")
        here = parity.loss_and_grads_at(run, state, batch(kind))
        if case.precision == "float32":
            found += [d.share for d in parity.distances(*here, *right)]
        else:
            alone = reference(cell.case, kind, case.precision)
            found.append(relative(here[1], right[1]) / (1.1 * relative(alone[1], right[1])))
    return float(np.max(found))  # NaN wins


@lru_cache
def reference(case: str, kind: str, precision: str) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case, precision), batch(kind))


@lru_cache
def reference_run(case: str, precision: str) -> parity.Run:
    plan = Plan("data=1", precision=precision)  # type: ignore[arg-type]
    return parity.run_on_enough_devices(Program(CASES[case].build, optax.sgd(0.1), plan))


def relative(grads: parity.Gradients, expected: parity.Gradients) -> float:
    """The Euclidean distance of all gradients, as a share of their norm."""
    difference = sum(float(np.sum((grads[path] - g) ** 2)) for path, g in expected.items())
    return (difference / sum(float(np.sum(g**2)) for g in expected.values())) ** 0.5
