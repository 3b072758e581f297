"""How far a cell of the parity table of pipelines is from one device."""

import time
from functools import lru_cache

import jax
import numpy as np
import optax

from experiments.pipeline_table import CASES, DEVICES_PER_NODE, Cell
from jaxpar import TOKENS, Plan, PlanError, Program, Run
from jaxpar.testing import parity

# A cell's largest error as a share of what is allowed; None: the plan was refused.
Share = float | None

# Seconds in which a plan that cannot be played must be refused.
SOON = 5.0

# How much farther than one device a mesh may be from float32. data=2,tensor=2 without a pipeline is 1.21 times as far.
BFLOAT16 = 1.25


def share(cell: Cell) -> Share:
    """The largest error over the leaves, as a share of what is allowed; None if the plan was refused, and soon."""
    started = time.monotonic()
    try:
        program = cell.program()
        devices = jax.devices()[: program.plan.shape.fixed_size()]
        run = program.on(devices, DEVICES_PER_NODE if program.plan.within_node else None)
    except PlanError:
        return None if time.monotonic() - started < SOON else np.inf
    state, case = run.init(0), CASES[cell.case]
    found = []
    for kind in case.kinds:
        right = reference(cell.case, kind, cell.rows, "float32")
        here = parity.loss_and_grads_at(run, state, case.make(kind, cell.rows))
        if case.precision == "float32":
            found += [d.share for d in parity.distances(*here, *right)]
        else:
            alone = reference(cell.case, kind, cell.rows, case.precision)
            found.append(relative(here[1], right[1]) / (BFLOAT16 * relative(alone[1], right[1])))
    return float(np.max(found))  # NaN wins


@lru_cache
def reference(case: str, kind: str, rows: int, precision: str) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case, precision), CASES[case].make(kind, rows))


@lru_cache
def reference_run(case: str, precision: str) -> Run:
    model, plan = CASES[case], Plan("data=1", precision=precision)  # type: ignore[arg-type]
    program = Program(model.build, optax.sgd(0.1), plan, batch_axes=model.batch_axes or TOKENS)
    return parity.run_on_enough_devices(program)


def relative(grads: parity.Gradients, expected: parity.Gradients) -> float:
    """The Euclidean distance of all gradients, as a share of their norm."""
    difference = sum(float(np.sum((grads[path] - g) ** 2)) for path, g in expected.items())
    return (difference / sum(float(np.sum(g**2)) for g in expected.values())) ** 0.5
