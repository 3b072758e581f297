"""How far a cell of the parity table of pipelines is from one device."""

import time
from functools import lru_cache

import jax
import numpy as np
import optax

from experiments import rounding
from experiments.pipeline_table import CASES, DEVICES_PER_NODE, Cell
from jaxpar import TOKENS, Plan, PlanError, Program, Run
from jaxpar.testing import parity

# A cell's largest error as a share of what is allowed; None: the plan was refused.
Share = float | None

# Seconds in which a plan that cannot be played must be refused.
SOON = 5.0


def share(cell: Cell) -> Share:
    """The largest error over the leaves, as a share of what is allowed; None if the plan was refused, and soon."""
    started = time.monotonic()
    try:
        program = cell.program()
        devices = jax.devices()[: program.plan.shape.fixed_size()]
        run = program.on(devices, DEVICES_PER_NODE if program.plan.within_node else None)
    except PlanError:
        return None if time.monotonic() - started < SOON else np.inf
    kinds = CASES[cell.case].kinds
    return float(np.max([_share(run, cell.case, kind, cell.rows) for kind in kinds]))  # NaN wins


def _share(run: Run, case: str, kind: str, rows: int) -> float:
    batch = CASES[case].make(kind, rows)
    if CASES[case].precision == "bfloat16":
        rounded = rounding.gradients(run, batch)
        return rounding.share(rounded, roundings(case, kind, rows, "bfloat16"), roundings(case, kind, rows, "float32"))
    here = parity.loss_and_grads_at(run, run.init(0), batch)
    errors = parity.distances(*here, *reference(case, kind, rows))
    return float(np.max([error.share for error in errors]))


@lru_cache
def reference(case: str, kind: str, rows: int) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case, "float32"), CASES[case].make(kind, rows))


@lru_cache
def roundings(case: str, kind: str, rows: int, precision: str) -> list[parity.Gradients]:
    return rounding.gradients(reference_run(case, precision), CASES[case].make(kind, rows))


@lru_cache
def reference_run(case: str, precision: str) -> Run:
    model, plan = CASES[case], Plan("data=1", precision=precision)  # type: ignore[arg-type]
    program = Program(model.build, optax.sgd(0.1), plan, batch_axes=model.batch_axes or TOKENS)
    return parity.run_on_enough_devices(program)
