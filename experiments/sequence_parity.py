"""The parity table of sequence parallelism: loss and gradients under every mode against one device.

    python -m experiments.sequence_parity            # goes on where it stopped; see --help

About 60 programs are compiled. Written to docs/parity_sequence.md; ends with status 1 if a cell fails. Until the table
is whole, results are kept by cell in a file beside it, `parity_sequence.jsonl`; delete that when the code has changed
meanwhile.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.parity import measure_all  # first: it sets what jax reads when it is imported

# ruff: isort: split
from experiments.sequence_report import report
from experiments.sequence_share import share
from experiments.sequence_table import Cell, cells


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
        for results in measure_all(measure, groups, args.jobs, share=False):
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


if __name__ == "__main__":
    main()
