"""Where every parameter lies: its shape as stored, its sharding, and what follows from them.

A stack's parameters are stored as `[virtual stage, stage, layer, *dims]`. A dim that does not divide is stored padded,
and seen logically by the model, the optimizer, checkpoints and exports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axis_rules import AxisRules, next_multiple
from jaxpar.collectives import live_spec
from jaxpar.mesh import ZERO_AXES, MeshShape, count
from jaxpar.plan import Plan
from jaxpar.structure import ParamInfo, Params, Structure

STACK_SPEC = (None, "pipe", None)


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies. Dims are counted without the stack's leading `[virtual stage, stage, layer]`.

    Attributes:
      padded: sizes of the dims as stored.
      tensor_spec: which dims are split over `tensor`; nothing else.
      zero_dim: the dim that ZeRO splits over `ZERO_AXES`; None: replicated over them.
      reduce_dtype: what the gradient is summed in over devices.
      notes: what a person should know, e.g. that the parameter is replicated although its rule names an axis.
    """

    info: ParamInfo
    padded: tuple[int, ...]
    tensor_spec: P
    zero_dim: int | None
    zero_stage: int
    reduce_dtype: str
    notes: tuple[str, ...] = ()

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.info.stack is None else (1, 1, self.info.shape[0])

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return self.lead + self.padded

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The storage shape without padding: what the optimizer sees."""
        return self.lead + self.info.dims

    @property
    def gathers(self) -> bool:
        """Parameters are stored as ZeRO shards and gathered where they are used."""
        return self.zero_stage == 3 and self.zero_dim is not None

    @property
    def scatters_each_microbatch(self) -> bool:
        return self.zero_stage >= 2 and self.zero_dim is not None

    @property
    def scatters(self) -> bool:
        return self.zero_stage >= 1 and self.zero_dim is not None

    def _spec(self, sharded: bool, manual_only: bool) -> P:
        dims: list[Any] = [None] * len(self.padded) if manual_only else list(self.tensor_spec)
        if sharded and self.zero_dim is not None:
            dims[self.zero_dim] = ZERO_AXES
        return P(*(STACK_SPEC if self.info.stack else ()), *dims)

    def param_spec(self, manual_only: bool = False) -> P:
        return self._spec(self.zero_stage == 3, manual_only)

    def update_spec(self, manual_only: bool = False) -> P:
        """Of the gradient after the step's region, and of optimizer state."""
        return self._spec(self.zero_stage >= 1, manual_only)


def place(structure: Structure, plan: Plan, mesh: Mesh) -> dict[str, Placement]:
    """The placement of every parameter; call `placement_problems` first."""
    return {path: _place_one(info, plan, mesh) for path, info in structure.params.items()}


def placement_problems(structure: Structure, plan: Plan, shape: MeshShape) -> list[str]:
    """What makes a model's parameters illegal on this mesh: every unknown name, clash and indivisible dim."""
    found = []
    for path, info in structure.params.items():
        wrong = plan.rules.problems(path, info.names)
        found += wrong
        if not wrong:
            found += _dim_problems(info, plan.rules, shape)
    return found


def _dim_problems(info: ParamInfo, rules: AxisRules, shape: MeshShape) -> list[str]:
    found = []
    for dim, (name, size) in enumerate(zip(info.names, info.dims, strict=True)):
        axis = rules.axis(name)
        if axis is None or size % shape.sizes[axis] == 0:
            continue
        count, policy = shape.sizes[axis], rules.uneven.get(str(name), "refuse")
        if policy == "pad" or (policy == "replicate" and count % size == 0):
            continue
        legal = [d for d in range(1, size + 1) if size % d == 0]
        mend = f"choose {axis} among {legal}, or make the dim {next_multiple(size, count)}"
        found.append(f"{info.path}: dim {dim} ({name!r}) of size {size} does not divide over {axis}={count}; {mend}")
    return found


def _place_one(info: ParamInfo, plan: Plan, mesh: Mesh) -> Placement:
    padded, spec, notes = list(info.dims), [], []
    for dim, (name, size) in enumerate(zip(info.names, info.dims, strict=True)):
        axis = plan.rules.axis(name)
        shards = 1 if axis is None else mesh.shape[axis]
        if size % shards and plan.rules.uneven.get(str(name)) == "replicate":
            notes.append(f"{name}={size} < {axis}={shards}: replicated over {axis}, each copy {shards // size} times")
            axis, shards = None, 1
        padded[dim] = next_multiple(size, shards)
        spec.append(axis)
    zero_shards = count(mesh, ZERO_AXES)
    zero_dim = _zero_dim(padded, spec, zero_shards) if plan.zero else None
    if zero_dim is not None:
        padded[zero_dim] = next_multiple(padded[zero_dim], zero_shards)
    elif plan.zero and zero_shards > 1:
        notes.append("no dim left for ZeRO: replicated over data")
    if tuple(padded) != info.dims:
        notes.append(f"stored padded: {info.dims} as {tuple(padded)}")
    return Placement(info, tuple(padded), P(*spec), zero_dim, plan.zero, plan.reduce_dtype, tuple(notes))


def _zero_dim(sizes: list[int], spec: list[str | None], shards: int) -> int | None:
    """The dim with the least padding, then the largest; not one that `tensor` splits: its shards would interleave."""
    free = [d for d, axis in enumerate(spec) if axis is None]
    if shards == 1 or not free:
        return None
    return min(free, key=lambda d: (next_multiple(sizes[d], shards) / max(sizes[d], 1), -sizes[d], d))


def pad(x: Array, sizes: tuple[int, ...]) -> Array:
    """Zeros behind the last dims of `x`, up to `sizes`; the leading dims stay."""
    lead = x.ndim - len(sizes)
    widths = [(0, 0)] * lead + [(0, want - have) for have, want in zip(x.shape[lead:], sizes, strict=True)]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x


def unpad(x: Array, sizes: tuple[int, ...]) -> Array:
    """The inverse of `pad`."""
    lead = x.ndim - len(sizes)
    if x.shape[lead:] == sizes:
        return x
    return jax.lax.slice(x, (0,) * x.ndim, (*x.shape[:lead], *sizes))


def to_storage(params: Params, placements: Mapping[str, Placement]) -> Params:
    """Logical parameters (stacks in depth order) as they are stored."""
    return {path: pad(x.reshape(placements[path].view_shape), placements[path].padded) for path, x in params.items()}


def to_logical(params: Params, placements: Mapping[str, Placement]) -> Params:
    """The inverse of `to_storage`."""
    return {
        path: unpad(x, placements[path].info.dims).reshape(placements[path].info.shape) for path, x in params.items()
    }


def logical_sharding(placement: Placement, mesh: Mesh, spec: P) -> NamedSharding:
    """A legal sharding of the logical array: `spec`'s axes where they divide, and none where they do not."""
    dims = list(live_spec(spec, mesh))[len(placement.lead) :]
    kept = [
        axes if axes is not None and size % count(mesh, axes) == 0 else None
        for size, axes in zip(placement.info.dims, dims, strict=True)
    ]
    return NamedSharding(mesh, P(*((None,) if placement.info.stack else ()), *kept))
