"""The sharding lint over every plan of the three parity tables: it must find nothing.

    python -m experiments.lint_tables                 # all of them, for 8 simulated devices
    python -m experiments.lint_tables --cluster 1x8xh100 --sample 20

Prints what it finds, and ends with status 1 if that is anything.
"""

import argparse
import os
import random
import sys
from collections.abc import Iterator, Mapping

# Compiles that are 2.7 times faster, with the same collectives. What the user has set comes last: it wins.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
)

import jax
import numpy as np

from experiments import parity_table, pipeline_table, sequence_table
from jaxpar import PlanError, Program
from jaxpar.estimate.compile import step_report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import topology_devices

Shapes = dict[str, jax.ShapeDtypeStruct]
Entry = tuple[str, Program, Shapes, int | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="1x8xcpu")
    parser.add_argument("--sample", type=int, help="so many entries, drawn at random")
    args = parser.parse_args()
    entries = list(programs())
    if args.sample is not None:
        entries = random.Random(0).sample(entries, min(args.sample, len(entries)))
    findings = 0
    for i, entry in enumerate(entries):
        found = lint_one(entry, args.cluster)
        findings += len(found)
        print(f"{i + 1}/{len(entries)} {entry[0]}: {len(found)} findings", *found, sep="\n  ", flush=True)
    print(f"{len(entries)} programs, {findings} findings")
    sys.exit(1 if findings else 0)


def lint_one(entry: Entry, cluster: str) -> list[str]:
    """Compiles one program on as many of the cluster's devices as its mesh has."""
    _, program, shapes, devices_per_node = entry
    devices = topology_devices(Cluster.parse(cluster))[: program.plan.shape.fixed_size()]
    run = program.on(devices, devices_per_node)
    return [str(finding) for finding in step_report(run, run.lower(shapes)).lint]


def programs() -> Iterator[Entry]:
    """Of the tables' legal entries those that differ as programs; weights are data."""
    seen = set[str]()
    for entry in (*_plain(), *_pipelines(), *_sequences()):
        _, program, shapes, nodes = entry
        key = f"{program.build} {program.plan} {shapes} {nodes}"
        if key not in seen:
            seen.add(key)
            yield entry


def _plain() -> Iterator[Entry]:
    for cell in parity_table.cells():
        yield str(cell), cell.program, _shapes(cell.batch()), None


def _pipelines() -> Iterator[Entry]:
    for cell in pipeline_table.cells():
        case = pipeline_table.CASES[cell.case]
        nodes = pipeline_table.DEVICES_PER_NODE if cell.case == "within node" else None
        try:
            yield str(cell), cell.program(), _shapes(case.make(case.kinds[0], cell.rows)), nodes
        except PlanError:
            continue  # the table's refusals


def _sequences() -> Iterator[Entry]:
    for cell in sequence_table.cells():
        batch = sequence_table.batch(sequence_table.CASES[cell.case].kinds[0])
        yield str(cell), cell.program, _shapes(batch), None


def _shapes(batch: Mapping[str, np.ndarray]) -> Shapes:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


if __name__ == "__main__":
    main()
