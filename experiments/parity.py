"""The whole parity table: loss and gradients of every plan against one device, written to docs/parity.md.

    python -m experiments.parity            # goes on where it stopped; see --help

About 200 programs are compiled. Ends with status 1 if a cell fails. Until the table is whole, results are kept by
cell in a file beside it, `parity.jsonl`; delete that when the code has changed meanwhile.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from experiments.table_run import Share, TableRun  # first: it sets what jax reads when it is imported

# ruff: isort: split
import numpy as np
import optax

from experiments.parity_report import report
from experiments.parity_table import Cell, cells, make_batch
from jaxpar import Plan, Program, Run, TrainState
from jaxpar.testing import parity
from models.llama import LlamaConfig

Group = list[Cell]


def main() -> None:
    # Without data, all ZeRO stages are one program: what one process has compiled is the others' too.
    TableRun(Cell, list(cells()), grouped, measure, report, Path("docs/parity.md"), caches=True).main(__doc__)


def grouped(todo: Sequence[Cell]) -> list[Group]:
    """Cells of one model, mesh and ZeRO stage together: they share programs, and one initial state."""
    groups: dict[tuple[str, ...], Group] = {}
    for cell in todo:
        packed = str(cell.weights == "packed")
        groups.setdefault((str(cell.config), packed, cell.mesh, str(cell.zero)), []).append(cell)
    return [groups[key] for key in sorted(groups)]


def measure(group: Group) -> list[tuple[Cell, Share]]:
    """Each cell with its largest error over the leaves, as a share of what is allowed."""
    runs = {cell.microbatches: parity.run_on_enough_devices(cell.program) for cell in group}
    state = next(iter(runs.values())).init(0)
    return [(cell, distance(runs[cell.microbatches], state, cell)) for cell in group]


def distance(run: Run, state: TrainState, cell: Cell) -> float:
    found = parity.loss_and_grads_at(run, state, cell.batch())
    distances = parity.distances(*found, *reference(cell.config, cell.weights, cell.rows))
    return float(np.max([d.share for d in distances]))  # NaN wins


@lru_cache
def reference(config: LlamaConfig, weights: str, rows: int) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(config), make_batch(weights, rows, config.vocab_size))


@lru_cache
def reference_run(config: LlamaConfig) -> Run:
    return parity.run_on_enough_devices(Program(config.build, optax.sgd(0.1), Plan("data=1")))


if __name__ == "__main__":
    main()
