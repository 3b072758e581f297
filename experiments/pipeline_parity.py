"""The parity table of pipelines: loss and gradients under every schedule against one device.

    python -m experiments.pipeline_parity            # goes on where it stopped; see --help

About 300 programs are compiled. Written to docs/parity_pipelines.md; ends with status 1 if a cell fails. Until the
table is whole, results are kept by cell in a file beside it, `parity_pipelines.jsonl`; delete that when the code has
changed meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from experiments.parity import measure_all  # first: it sets what jax reads when it is imported

# ruff: isort: split
import jax
import numpy as np
import optax

from experiments.pipeline_report import report
from experiments.pipeline_table import CASES, DEVICES_PER_NODE, Cell, cells
from jaxpar import Plan, PlanError, Program
from jaxpar.testing import parity

# A cell's largest error as a share of what is allowed; None: the plan was refused.
Share = float | None

# Seconds in which a plan that cannot be played must be refused.
SOON = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/parity_pipelines.md"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which compiles on its own")
    args = parser.parse_args()
    record = args.output.with_suffix(".jsonl")
    done = read(record)
    groups = group(cell for cell in cells() if cell not in done)
    with record.open("a") as file:
        for i, results in enumerate(measure_all(measure, groups, args.jobs)):
            for cell, share in results:
                done[cell] = share
                print(json.dumps(asdict(cell) | {"share": share}), file=file, flush=True)
                print(f"{i + 1}/{len(groups)} {cell}: {share}", flush=True)
    args.output.write_text(report(done))
    record.unlink()  # results of this code must not stand in for those of the next
    failed = [cell for cell, share in done.items() if share is not None and not share <= 1]
    print(f"{len(done)} cells, {len(failed)} failed; written to {args.output}")
    sys.exit(1 if failed else 0)


def read(record: Path) -> dict[Cell, Share]:
    """The cells measured so far."""
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(**{k: v for k, v in row.items() if k != "share"}): row["share"] for row in rows}


def group(todo: Iterable[Cell]) -> list[list[Cell]]:
    """Cells of one model together: they share the program on one device."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in todo:
        groups.setdefault((cell.case, cell.schedule), []).append(cell)
    return list(groups.values())


def measure(group: list[Cell]) -> list[tuple[Cell, Share]]:
    return [(cell, share(cell)) for cell in group]


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
            found.append(relative(here[1], right[1]) / (1.1 * relative(alone[1], right[1])))
    return float(np.max(found))  # NaN wins


@lru_cache
def reference(case: str, kind: str, rows: int, precision: str) -> tuple[float, parity.Gradients]:
    return parity.run_loss_and_grads(reference_run(case, precision), CASES[case].make(kind, rows))


@lru_cache
def reference_run(case: str, precision: str) -> parity.Run:
    program = Cell(case, "1f1b", "pipe=2", 1).program()
    alone = replace(program, plan=Plan("data=1", precision=precision), optimizer=optax.sgd(0.1))  # type: ignore[arg-type]
    return parity.run_on_enough_devices(alone)


def relative(grads: parity.Gradients, expected: parity.Gradients) -> float:
    """The Euclidean distance of all gradients, as a share of their norm."""
    difference = sum(float(np.sum((grads[path] - g) ** 2)) for path, g in expected.items())
    return (difference / sum(float(np.sum(g**2)) for g in expected.values())) ** 0.5


if __name__ == "__main__":
    main()
