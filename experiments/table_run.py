"""Measures the cells of a parity table in processes, keeps what is done, and writes the page.

Imported before anything that imports jax: it sets what jax reads when it is imported.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import batched
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Eight devices, and compiles that are 2.7 times faster with the same parity. What the user has set comes last: it wins.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
)

import jax

jax.config.update("jax_default_matmul_precision", "highest")

# A cell's largest error as a share of what is allowed; None: the plan was refused.
Share = float | None


@dataclass(frozen=True)
class TableRun[C]:
    """What a table's command does. `C` is a dataclass: one cell.

    Attributes:
      cells: all of them.
      grouped: cells that a process measures together, because they share programs.
      measure: of one group, at the top of a module: processes import it.
      page: markdown.
      caches: whether processes share what they compile; on CPU not with pipelines, see docs/design.md.
    """

    kind: type[C]
    cells: Sequence[C]
    grouped: Callable[[Sequence[C]], list[list[C]]]
    measure: Callable[[list[C]], list[tuple[C, Share]]]
    page: Callable[[Mapping[C, Any]], str]
    output: Path
    caches: bool = False

    def main(self, description: str) -> None:
        """Ends with status 1 if a cell fails, 0 otherwise."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--output", type=Path, default=self.output)
        parser.add_argument("--jobs", type=int, default=1, help="processes, each of which compiles on its own")
        args = parser.parse_args()
        done = self._measured(args.output.with_suffix(".jsonl"), args.jobs)
        args.output.write_text(self.page(done))
        args.output.with_suffix(".jsonl").unlink()  # results of this code must not stand in for those of the next
        failed = [cell for cell, share in done.items() if share is not None and not share <= 1]
        print(f"{len(done)} cells, {len(failed)} failed; written to {args.output}")
        sys.exit(1 if failed else 0)

    def _measured(self, record: Path, jobs: int) -> dict[C, Share]:
        table = dict.fromkeys(self.cells)
        done = {cell: share for cell, share in self._read(record).items() if cell in table}
        groups = self.grouped([cell for cell in table if cell not in done])
        with record.open("a") as file:
            for i, results in enumerate(measure_all(self.measure, groups, jobs, self.caches)):
                for cell, share in results:
                    done[cell] = share
                    print(json.dumps(asdict(cell) | {"share": share}), file=file, flush=True)  # type: ignore[call-overload]
                    print(f"{i + 1}/{len(groups)} {cell}: {share}", flush=True)
        return done

    def _read(self, record: Path) -> dict[C, Share]:
        """The cells measured so far."""
        lines = record.read_text().splitlines() if record.exists() else []
        rows = [json.loads(line) for line in lines]
        return {self.kind(**{k: v for k, v in row.items() if k != "share"}): row["share"] for row in rows}


def measure_all[G, R](measure: Callable[[G], R], groups: Sequence[G], jobs: int, caches: bool) -> Iterator[R]:
    """A process keeps all that it has compiled: after some groups new ones take their place."""
    with TemporaryDirectory() as cache:
        if caches:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for some in batched(groups, 20 * jobs):
            with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
                yield from pool.map(measure, some)
