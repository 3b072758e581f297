"""Every plan of the four parity tables, as a program to compile and lint."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments import expert_table, parity_table, pipeline_table, sequence_table
from jaxpar import PlanError, Program
from jaxpar.estimate.compile import step_report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import topology_devices

Shapes = dict[str, jax.ShapeDtypeStruct]
Entry = tuple[str, Program, Shapes, int | None]


def lint_one(entry: Entry, cluster: str) -> list[str]:
    """Compiles one program on as many of the cluster's devices as its mesh has."""
    _, program, shapes, devices_per_node = entry
    devices = topology_devices(Cluster.parse(cluster))[: program.plan.shape.fixed_size()]
    run = program.on(devices, devices_per_node)
    return [str(finding) for finding in step_report(run, run.lower(shapes)).lint]


def entries() -> Iterator[Entry]:
    """Of the tables' legal entries those that differ as programs; weights are data."""
    seen = set[str]()
    tables = (parity_table, pipeline_table, sequence_table, expert_table)
    for cell in (cell for table in tables for cell in table.cells()):
        try:
            found = entry(cell)
        except PlanError:
            continue  # the table's refusals
        _, program, *rest = found
        if (key := f"{program.build} {program.plan} {rest}") not in seen:
            seen.add(key)
            yield found


def entry(cell: Any) -> Entry:
    """A cell of any of the tables. Raises `PlanError` where it has no legal plan."""
    if isinstance(cell, parity_table.Cell):
        return str(cell), cell.program, _shapes(cell.batch()), None
    if isinstance(cell, sequence_table.Cell):
        kind = sequence_table.CASES[cell.case].kinds[0]
        return str(cell), cell.program, _shapes(sequence_table.batch(kind)), None
    if isinstance(cell, expert_table.Cell):
        kind = expert_table.CASES[cell.case].kinds[0]
        return str(cell), cell.program, _shapes(expert_table.batch(kind)), None
    case = pipeline_table.CASES[cell.case]
    nodes = pipeline_table.DEVICES_PER_NODE if cell.case == "within node" else None
    return str(cell), cell.program(), _shapes(case.make(case.kinds[0], cell.rows)), nodes


def _shapes(batch: Mapping[str, np.ndarray]) -> Shapes:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
