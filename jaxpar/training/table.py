"""Where every parameter lies, as a table that a person reads."""

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import offload
from jaxpar.run import Run

_HEADER = ("parameter", "logical names", "shape", "stored as", "split", "bytes/device", "notes")


def sharding_table(run: Run) -> str:
    """A line for each parameter: its dims by name and size, how it is stored and split, its bytes on one device.

    "shape" has the layers of a stack in front, "stored as" virtual stage, stage and layer; "split" counts the dims of
    the stored array from 0.
    """
    rows: list[tuple[str, ...]] = [_HEADER]
    for path, placement in run.placements.items():
        array: Any = run.abstract_state.params[path]
        names = ("layer",) if placement.info.stack else ()
        rows.append(
            (
                path,
                _dims(names + tuple(name or "-" for name in placement.info.names)),
                _dims(placement.info.shape),
                _dims(placement.storage_shape),
                _spec(array.sharding.spec, run.mesh),
                f"{bytes_per_device([array]):,}",
                "; ".join(placement.notes),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    state = run.abstract_state
    sizes = {"parameters": bytes_per_device(state.params), "optimizer state": bytes_per_device(state.opt_state)}
    if waiting := bytes_per_device(state.opt_state, on_host=True):
        sizes["optimizer state in host memory"] = waiting
    count = sum(prod(p.info.shape) for p in run.placements.values())
    head = f"{run.plan} on {run.mesh.size} devices; {count:,} parameters"
    return "\n".join([head, "", *lines, "", *(f"{name}: {size:,} bytes/device" for name, size in sizes.items())])


def read_sharding_table(text: str) -> tuple[str, list[tuple[str, ...]], str]:
    """What `sharding_table` wrote -> what stands above it, its rows from the header on, what stands below."""
    head, table, foot = (*text.split("\n\n", 2), "", "")[:3]
    lines = table.splitlines()
    starts = [found.start() for found in re.finditer(r"\S+(?: \S+)*", lines[0])] if lines else []
    ends = [*starts[1:], None]
    return head, [tuple(line[a:b].strip() for a, b in zip(starts, ends, strict=True)) for line in lines], foot.strip()


def bytes_per_device(arrays: Any, on_host: bool = False) -> int:
    """Bytes that one device holds of these arrays, abstract or not, or that wait for it in host memory; random keys
    count 0."""
    leaves: Iterable[Any] = jax.tree.leaves(arrays)
    return sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in leaves
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and offload.is_on_host(x.sharding) == on_host
    )


def _dims(dims: Iterable[Any]) -> str:
    return "[" + ", ".join(map(str, dims)) + "]"


def _spec(spec: Iterable[Any], mesh: Mesh) -> str:
    """`dim: axes` for each dim that is split; an axis of size 1 splits nothing."""
    split = []
    for dim, axes in enumerate(spec):
        named = (axes,) if isinstance(axes, str) else axes or ()
        if real := [axis for axis in named if mesh.shape[axis] > 1]:
            split.append(f"{dim}: {' '.join(real)}")
    return ", ".join(split) or "replicated"
