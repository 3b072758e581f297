"""The parity table of experts: loss and gradients under every router and exchange against one device.

    python -m experiments.expert_parity            # goes on where it stopped; see --help

About 40 programs are compiled. Written to docs/parity_experts.md; ends with status 1 if a cell fails. Until the table
is whole, results are kept by cell in a file beside it, `parity_experts.jsonl`; delete that when the code has changed
meanwhile.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from experiments.table_run import Share, TableRun  # first: it sets what jax reads when it is imported

# ruff: isort: split
import numpy as np
import optax

from experiments.expert_table import CASES, Cell, batch, cells, page
from jaxpar import Plan, Program, Run
from jaxpar.testing import parity


def main() -> None:
    output = Path("docs/parity_experts.md")
    TableRun(Cell, list(cells()), grouped, measure, page, output).main(__doc__)


def grouped(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one model after each other: a process keeps the program on one device."""
    return [[cell] for cell in sorted(todo, key=lambda cell: cell.case)]


def measure(group: list[Cell]) -> list[tuple[Cell, Share]]:
    return [(cell, share(cell)) for cell in group]


def share(cell: Cell) -> float:
    """The largest error over batches and leaves, as a share of what is allowed."""
    run, found = parity.run_on_enough_devices(cell.program), []
    state = run.init(0)
    for kind in CASES[cell.case].kinds:
        here = parity.loss_and_grads_at(run, state, batch(kind))
        found += [error.share for error in parity.distances(*here, *reference(cell.case, kind))]
    return float(np.max(found))  # NaN wins


@lru_cache
def reference(case: str, kind: str) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case), batch(kind))


@lru_cache
def reference_run(case: str) -> Run:
    return parity.run_on_enough_devices(Program(CASES[case].build, optax.sgd(0.1), Plan("data=1")))


if __name__ == "__main__":
    main()
