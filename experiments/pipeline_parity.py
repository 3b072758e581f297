"""The parity table of pipelines: loss and gradients under every schedule against one device.

    python -m experiments.pipeline_parity            # goes on where it stopped; see --help

About 300 programs are compiled. Written to docs/parity_pipelines.md; ends with status 1 if a cell fails. Until the
table is whole, results are kept by cell in a file beside it, `parity_pipelines.jsonl`; delete that when the code has
changed meanwhile.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.table_run import Share, TableRun  # first: it sets what jax reads when it is imported

# ruff: isort: split
from experiments.pipeline_measure import share
from experiments.pipeline_report import report
from experiments.pipeline_table import Cell, cells


def main() -> None:
    TableRun(Cell, list(cells()), grouped, measure, report, Path("docs/parity_pipelines.md")).main(__doc__)


def grouped(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Few enough that little is lost when it stops; a process works through some groups, and keeps references."""
    groups: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in todo:
        groups.setdefault((cell.case, cell.schedule, cell.mesh, cell.virtual_stages), []).append(cell)
    return list(groups.values())


def measure(group: list[Cell]) -> list[tuple[Cell, Share]]:
    return [(cell, share(cell)) for cell in group]


if __name__ == "__main__":
    main()
