"""The parity table of pipelines: loss and gradients under every schedule against one device.

    python -m experiments.pipeline_parity            # goes on where it stopped; see --help

About 300 programs are compiled. Written to docs/parity_pipelines.md; ends with status 1 if a cell fails. Until the
table is whole, results are kept by cell in a file beside it, `parity_pipelines.jsonl`; delete that when the code has
changed meanwhile.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from experiments.parity import measure_all  # first: it sets what jax reads when it is imported

# ruff: isort: split
from experiments.pipeline_measure import Share, share
from experiments.pipeline_report import report
from experiments.pipeline_table import Cell, cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/parity_pipelines.md"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which compiles on its own")
    args = parser.parse_args()
    record = args.output.with_suffix(".jsonl")
    table = dict.fromkeys(cells())
    done = {cell: found for cell, found in read(record).items() if cell in table}
    groups = group(cell for cell in table if cell not in done)
    with record.open("a") as file:
        for i, results in enumerate(measure_all(measure, groups, args.jobs, share=False)):
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
    """Few enough that little is lost when it stops; a process works through some groups, and keeps references."""
    groups: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in todo:
        groups.setdefault((cell.case, cell.schedule, cell.mesh, cell.virtual_stages), []).append(cell)
    return list(groups.values())


def measure(group: list[Cell]) -> list[tuple[Cell, Share]]:
    return [(cell, share(cell)) for cell in group]


if __name__ == "__main__":
    main()
