"""The parity table of sequence parallelism: loss and gradients under every mode against one device.

    python -m experiments.sequence_parity            # goes on where it stopped; see --help

About 60 programs are compiled. Written to docs/parity_sequence.md; ends with status 1 if a cell fails. Until the table
is whole, results are kept by cell in a file beside it, `parity_sequence.jsonl`; delete that when the code has changed
meanwhile.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from experiments.parity import measure_all  # first: it sets what jax reads when it is imported

# ruff: isort: split
import numpy as np

from experiments.sequence_report import report
from experiments.sequence_table import CASES, Cell, batch, cells
from jaxpar import Plan
from jaxpar.testing import parity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/parity_sequence.md"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which compiles on its own")
    args = parser.parse_args()
    record = args.output.with_suffix(".jsonl")
    done = read(record)
    # Cells of one model after each other: a process keeps the program on one device.
    groups = [[cell] for cell in sorted(cells(), key=lambda cell: cell.case) if cell not in done]
    with record.open("a") as file:
        for results in measure_all(measure, groups, args.jobs):
            for cell, share in results:
                done[cell] = share
                print(json.dumps(asdict(cell) | {"share": share}), file=file, flush=True)
                print(f"{cell}: {share:.2f} of what is allowed", flush=True)
    args.output.write_text(report(done))
    record.unlink()  # results of this code must not stand in for those of the next
    failed = [cell for cell, share in done.items() if not share <= 1]
    print(f"{len(done)} cells, {len(failed)} failed; written to {args.output}")
    sys.exit(1 if failed else 0)


def read(record: Path) -> dict[Cell, float]:
    """The cells measured so far."""
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(**{k: v for k, v in row.items() if k != "share"}): row["share"] for row in rows}


def measure(group: list[Cell]) -> list[tuple[Cell, float]]:
    return [(cell, share(cell)) for cell in group]


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
    program = next(cell for cell in cells() if cell.case == case).program
    return parity.run_on_enough_devices(replace(program, plan=Plan("data=1", precision=precision)))  # type: ignore[arg-type]


def relative(grads: parity.Gradients, expected: parity.Gradients) -> float:
    """The Euclidean distance of all gradients, as a share of their norm."""
    difference = sum(float(np.sum((grads[path] - g) ** 2)) for path, g in expected.items())
    return (difference / sum(float(np.sum(g**2)) for g in expected.values())) ** 0.5


if __name__ == "__main__":
    main()
