"""How far a cell of the parity table of sequence parallelism is from one device."""

from functools import lru_cache

import numpy as np
import optax

from experiments import rounding
from experiments.sequence_table import CASES, Cell, batch
from jaxpar import Plan, Program, Run
from jaxpar.testing import parity


def share(cell: Cell) -> float:
    """The largest error over batches and leaves, as a share of what is allowed."""
    run = parity.run_on_enough_devices(cell.program)
    case = CASES[cell.case]
    return float(np.max([_share(run, cell.case, kind) for kind in case.kinds]))  # NaN wins


def _share(run: Run, case: str, kind: str) -> float:
    if CASES[case].precision == "bfloat16":
        rounded = rounding.gradients(run, batch(kind))
        return rounding.share(rounded, roundings(case, kind, "bfloat16"), roundings(case, kind, "float32"))
    here = parity.loss_and_grads_at(run, run.init(0), batch(kind))
    errors = parity.distances(*here, *reference(case, kind))
    return float(np.max([error.share for error in errors]))


@lru_cache
def reference(case: str, kind: str) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case, "float32"), batch(kind))


@lru_cache
def roundings(case: str, kind: str, precision: str) -> list[parity.Gradients]:
    return rounding.gradients(reference_run(case, precision), batch(kind))


@lru_cache
def reference_run(case: str, precision: str) -> Run:
    plan = Plan("data=1", precision=precision)  # type: ignore[arg-type]
    return parity.run_on_enough_devices(Program(CASES[case].build, optax.sgd(0.1), plan))
