"""The parity table of sequence parallelism: loss and gradients under every mode against one device.

    python -m experiments.sequence_parity            # goes on where it stopped; see --help

About 60 programs are compiled. Written to docs/parity_sequence.md; ends with status 1 if a cell fails. Until the table
is whole, results are kept by cell in a file beside it, `parity_sequence.jsonl`; delete that when the code has changed
meanwhile.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.table_run import Share, TableRun  # first: it sets what jax reads when it is imported

# ruff: isort: split
from experiments.sequence_report import report
from experiments.sequence_share import share
from experiments.sequence_table import Cell, cells


def main() -> None:
    TableRun(Cell, list(cells()), grouped, measure, report, Path("docs/parity_sequence.md")).main(__doc__)


def grouped(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one model after each other: a process keeps the program on one device."""
    return [[cell] for cell in sorted(todo, key=lambda cell: cell.case)]


def measure(group: list[Cell]) -> list[tuple[Cell, Share]]:
    return [(cell, share(cell)) for cell in group]


if __name__ == "__main__":
    main()
