"""The whole parity table: loss and gradients of every plan against one device, written to docs/parity.md.

    python -m experiments.parity            # goes on where it stopped; see --help

About 200 programs are compiled. Ends with status 1 if a cell fails. Until the table is whole, results are kept by
cell in a file beside it, `parity.jsonl`; delete that when the code has changed meanwhile.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from itertools import batched
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

# Eight devices, and compiles that are 2.7 times faster with the same parity. What the user has set comes last: it wins.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
)

import jax
import numpy as np
import optax

from experiments.parity_report import report
from experiments.parity_table import Cell, cells, make_batch
from jaxpar import Plan, Program, Run, TrainState
from jaxpar.testing import parity
from models.llama import LlamaConfig

jax.config.update("jax_default_matmul_precision", "highest")

Group = list[Cell]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/parity.md"))
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
            worst = max(results, key=lambda r: r[1])
            print(f"{i + 1}/{len(groups)} {worst[0]}: {worst[1]:.2f} of what is allowed", flush=True)
    args.output.write_text(report(done))
    record.unlink()  # results of this code must not stand in for those of the next
    failed = [cell for cell, share in done.items() if not share <= 1]
    print(f"{len(done)} cells, {len(failed)} failed; written to {args.output}")
    sys.exit(1 if failed else 0)


def measure_all[G, R](measure: Callable[[G], R], groups: Sequence[G], jobs: int, share: bool = True) -> Iterator[R]:
    """In processes that `share` what they compile: without data, all ZeRO stages are one program.

    A process keeps all that it has compiled: after some groups new ones take their place.
    """
    with TemporaryDirectory() as cache:
        if share:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for some in batched(groups, 20 * jobs):
            with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
                yield from pool.map(measure, some)


def read(record: Path) -> dict[Cell, float]:
    """The cells measured so far, with their largest error as a share of what is allowed."""
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(**{k: v for k, v in row.items() if k != "share"}): row["share"] for row in rows}


def group(todo: Iterable[Cell]) -> list[Group]:
    """Cells of one model, mesh and ZeRO stage together: they share programs, and one initial state."""
    groups: dict[tuple[str, ...], Group] = {}
    for cell in todo:
        packed = str(cell.weights == "packed")
        groups.setdefault((str(cell.config), packed, cell.mesh, str(cell.zero)), []).append(cell)
    return [groups[key] for key in sorted(groups)]


def measure(group: Group) -> list[tuple[Cell, float]]:
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
