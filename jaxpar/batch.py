"""What a batch looks like, and what is wrong with one: names, shapes, and token ids."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.axis_rules import next_multiple
from jaxpar.errors import BatchError
from jaxpar.mesh import ROW_AXES
from jaxpar.plan import Plan

BatchAxes = Mapping[str, tuple[str | None, ...]]

_PER_TOKEN = ("rows", "positions")

# A batch of tokens. `positions` and `segments` are optional: without them a row is one document.
TOKENS: BatchAxes = {name: _PER_TOKEN for name in ("tokens", "targets", "weights", "positions", "segments")}

_OPTIONAL = ("positions", "segments")
_TOKEN_IDS = ("tokens", "targets")
_MESH_AXES: Mapping[str | None, Any] = {"rows": ROW_AXES, "positions": "seq", None: None}


def token_shapes(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one step's token batch: global rows, positions."""
    types = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in types.items()}


def batch_spec(axes: BatchAxes, name: str) -> P:
    """Rows over `data` and `expert`, positions over `seq`, nothing else split."""
    return P(*(_MESH_AXES[axis] for axis in axes[name]))


def position_dim(axes: BatchAxes, name: str) -> int | None:
    """Which dim of an array are positions, None if it has none."""
    return axes[name].index("positions") if "positions" in axes[name] else None


def local_positions(axes: BatchAxes, batch: Mapping[str, Any]) -> int | None:
    """How many positions the arrays at hand have; None if no array has any."""
    for name, x in batch.items():
        if "positions" in axes[name]:
            return x.shape[x.ndim - len(axes[name]) + axes[name].index("positions")]
    return None


def batch_problems(batch: Mapping[str, Any], axes: BatchAxes, plan: Plan) -> list[str]:
    """Why global arrays of these shapes cannot be split as the plan says. The plan's mesh is resolved."""
    found = []
    sizes = plan.shape.sizes
    shards = sizes["data"] * sizes["expert"]
    parts = shards * plan.microbatches
    rows = {x.shape[0] for x in batch.values()}
    if len(rows) > 1:
        found.append(f"arrays have different numbers of rows: { {n: x.shape[0] for n, x in batch.items()} }")
    for count in sorted(rows):
        if count == 0 or count % parts:
            found.append(
                f"{count} rows do not divide into data x expert x microbatches = {sizes['data']} x {sizes['expert']} x "
                f"{plan.microbatches} = {parts} parts; give a positive multiple of {parts}"
            )
    length = local_positions(axes, batch)
    found += _sequence_problems(length, plan)
    if length is not None and plan.sequence_sharded_norms and length % sizes["tensor"]:
        found.append(
            f"{length} positions do not divide over tensor={sizes['tensor']}, as sequence_sharded_norms needs; "
            f"give a multiple of {sizes['tensor']}, or turn it off"
        )
    return found


def position_problems(axes: BatchAxes, mixing: Sequence[str], plan: Plan) -> list[str]:
    """Why rows of such arrays cannot be split over `seq` at all. `mixing`: `Structure.mixing`."""
    seq, found = plan.shape.sizes["seq"], []
    if seq > 1 and not any("positions" in dims for dims in axes.values()):
        found.append(
            f"seq={seq} splits positions, and no array of the batch has any; use data or tensor in place of seq"
        )
    if seq > 1 and mixing:
        found.append(
            f"seq={seq} splits positions, and {', '.join(mixing)} (mixes_positions = True) would see only a device's "
            f"own; use data or tensor in place of seq, or let positions meet in ctx.attend alone"
        )
    return found


def step_problems(step_wide: Sequence[str], plan: Plan) -> list[str]:
    """Why a step cannot be worked through in parts. `step_wide`: `Structure.step_wide`."""
    stages = plan.shape.sizes["pipe"]
    if not step_wide or (plan.microbatches == 1 and stages == 1):
        return []
    return [
        f"{', '.join(step_wide)} (needs_whole_step = True) sums over all rows of a step at once, and microbatches="
        f"{plan.microbatches}, pipe={stages} work through them in parts; set microbatches=1 and pipe=1 (data, tensor, "
        f"seq and expert may split the step), or take a loss per row, such as MoEConfig(balance='row')"
    ]


def _sequence_problems(length: int | None, plan: Plan) -> list[str]:
    seq = plan.shape.sizes["seq"]
    if seq == 1 or length is None:
        return []
    multiple = seq if plan.attention == "ulysses" or seq == plan.ulysses else 2 * seq
    if length % multiple == 0:
        return []
    why = "seq" if multiple == seq else "2 x seq, in zigzag order,"
    return [
        f"{length} positions do not divide over {why} = {multiple}; give a multiple of {multiple}, e.g. "
        f"{next_multiple(length, multiple)}, filled up with weight 0"
    ]


def check_batch(batch: Mapping[str, Any], axes: BatchAxes, vocab_size: int | None) -> None:
    """Raises `BatchError` for wrong names and ranks, and for token ids outside the vocabulary."""
    for name in batch:
        if name not in axes:
            close = difflib.get_close_matches(name, axes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise BatchError(f"unknown array {name!r} in the batch{hint}; batch_axes declares {', '.join(axes)}")
    missing = [name for name in axes if name not in batch and name not in _OPTIONAL]
    if missing:
        raise BatchError(f"the batch lacks {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}")
    for name, x in batch.items():
        if len(x.shape) != len(axes[name]):
            raise BatchError(f"{name!r} needs the dims {axes[name]}, found shape {tuple(x.shape)}")
    if vocab_size is not None and all(axes.get(name) == _PER_TOKEN for name in _TOKEN_IDS):
        for name in _TOKEN_IDS:
            _check_ids(name, np.asarray(batch[name]), vocab_size)


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    row, position = (int(i) for i in np.argwhere(wrong)[0])
    raise BatchError(
        f"{name!r} has {int(wrong.sum())} ids outside the vocabulary of {vocab_size}: the first is "
        f"{int(ids[row, position])} at row {row}, position {position}, the largest {int(ids.max())}; "
        f"ids go from 0 to {vocab_size - 1}: use the tokenizer that the model was sized for"
    )
