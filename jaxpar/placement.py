"""Where every parameter lies: its shape as stored, its sharding, and what follows from them.

A stack's parameters are stored as `[virtual stage, stage, layer, *dims]`. A dim that does not divide is stored padded,
and seen logically by the model, the optimizer, checkpoints and exports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axis_rules import AxisRules, next_multiple
from jaxpar.collectives import axis_size, live_spec
from jaxpar.errors import PlanError
from jaxpar.mesh import MANUAL_AXES, REPLICA_AXES, ZERO_AXES, MeshShape, count
from jaxpar.pipeline.layers import StageLayers
from jaxpar.plan import Plan
from jaxpar.structure import ParamInfo, Params, Structure

STACK_SPEC = (None, "pipe", None)

# The logical name of the dim that stages of a pipeline share.
VOCABULARY = "vocab"


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies. Dims are counted without the stack's leading `[virtual stage, stage, layer]`.

    Attributes:
      padded: sizes of the dims as stored.
      tensor_spec: which dims are split over `tensor`; nothing else.
      zero_dim: the dim that ZeRO splits over `zero_axes`; None: replicated over them.
      reduce_dtype: what the gradient is summed in over devices.
      layers: where a stack's layers lie; None: a parameter outside the stacks.
      parts: which dims are split over another manual axis, of which the model is handed its part: experts over
        `expert`, the vocabulary over `pipe` (see `parallel.vocabulary`).
      notes: what a person should know, e.g. that the parameter is replicated although its rule names an axis.
    """

    info: ParamInfo
    padded: tuple[int, ...]
    tensor_spec: P
    zero_dim: int | None
    zero_stage: int
    reduce_dtype: str
    notes: tuple[str, ...] = ()
    layers: StageLayers | None = None
    parts: tuple[tuple[int, str], ...] = ()

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """What ZeRO shards over: where the parameter would be replicated."""
        return tuple(axis for axis in ZERO_AXES if axis not in self._part_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """What the gradient is summed over."""
        return tuple(axis for axis in REPLICA_AXES if axis not in self._part_axes)

    @property
    def shared_over_pipe(self) -> bool:
        return "pipe" in self._part_axes

    @property
    def _part_axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axis in self.parts)

    def local(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Of dims of these sizes, what the model is handed on one device: its part, which is never cut short."""
        found = list(sizes)
        for dim, axis in self.parts:
            found[dim] = self.padded[dim] // axis_size(axis)
        return tuple(found)

    @property
    def lead(self) -> tuple[int, ...]:
        """`[virtual stage, stage, layer]` of a stack's parameter."""
        return () if self.layers is None else (self.layers.chunks, self.layers.stages, self.layers.longest)

    @property
    def local_lead(self) -> tuple[int, ...]:
        """`[virtual stage x layer]`: what a stage computes with and accumulates in."""
        return () if self.layers is None else (self.layers.chunks * self.layers.longest,)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return self.lead + self.padded

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The storage shape without padding: what the optimizer sees."""
        return self.lead + self.info.dims

    def computes_in(self, dtype: Any) -> Any:
        """What the model is given it in under a plan that computes in `dtype`; None: as it is stored."""
        return None if self.info.float32 or not jnp.issubdtype(self.info.dtype, jnp.floating) else dtype

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
        for dim, axis in self.parts:
            dims[dim] = axis if manual_only or self.tensor_spec[dim] is None else (axis, self.tensor_spec[dim])
        if sharded and self.zero_dim is not None:
            dims[self.zero_dim] = self.zero_axes
        return P(*(STACK_SPEC if self.info.stack else ()), *dims)

    def param_spec(self, manual_only: bool = False) -> P:
        return self._spec(self.zero_stage == 3, manual_only)

    def update_spec(self, manual_only: bool = False) -> P:
        """Of the gradient after the step's region, and of optimizer state."""
        return self._spec(self.zero_stage >= 1, manual_only)


def place(structure: Structure, plan: Plan, mesh: Mesh) -> dict[str, Placement]:
    """The placement of every parameter; call `placement_problems` first."""
    cut = plan.stack_layers(structure.stack_lengths, mesh.shape["pipe"])
    return {
        path: _place_one(info, plan, mesh, None if info.stack is None else cut[info.stack])
        for path, info in structure.params.items()
    }


def placement_problems(structure: Structure, plan: Plan, shape: MeshShape) -> list[str]:
    """What makes a model's parameters illegal on this mesh: every unknown name, clash and indivisible dim."""
    found = []
    for path, info in structure.params.items():
        wrong = plan.rules.problems(path, info.names)
        found += wrong
        if not wrong:
            found += _dim_problems(info, plan.rules, shape)
    try:
        plan.stack_layers(structure.stack_lengths, shape.sizes["pipe"])
    except PlanError as error:
        found += error.problems
    return found + _slice_problems(structure, plan.rules, shape)


def _slice_problems(structure: Structure, rules: AxisRules, shape: MeshShape) -> list[str]:
    """Slices of the vocabulary are told by their rows alone, see `parallel.vocabulary`: no two may be alike."""
    stages, axis = shape.sizes["pipe"], rules.axes.get(VOCABULARY)
    if stages == 1:
        return []
    found, alike = [], dict[int, ParamInfo]()
    for path, info in structure.params.items():
        if not _is_table(info):
            continue
        rows = next_multiple(info.dims[0], stages * (shape.sizes[axis] if axis else 1)) // stages
        other = alike.setdefault(rows, info)
        if other.dims[0] != info.dims[0]:
            found.append(
                f"on {stages} stages the vocabularies of {other.path} ({other.dims[0]}) and {path} ({info.dims[0]}) "
                f"are both cut into slices of {rows} rows, which cannot be told apart; make one of them larger, e.g. "
                f"{stages * rows + 1}"
            )
    return found


def _is_table(info: ParamInfo) -> bool:
    """What the stages of a pipeline share, each its slice of the rows."""
    return info.stack is None and info.names[:1] == (VOCABULARY,)


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


def _place_one(info: ParamInfo, plan: Plan, mesh: Mesh, layers: StageLayers | None) -> Placement:
    padded, spec, notes = list(info.dims), [], []
    parts = _parts(info, plan, mesh)
    for dim, (name, size) in enumerate(zip(info.names, info.dims, strict=True)):
        axis = plan.rules.axis(name)
        axis = None if axis in MANUAL_AXES or axis is None or mesh.shape[axis] == 1 else axis
        shards = 1 if axis is None else mesh.shape[axis]
        if size % shards and plan.rules.uneven.get(str(name)) == "replicate":
            notes.append(f"{name}={size} < {axis}={shards}: replicated over {axis}, each copy {shards // size} times")
            axis, shards = None, 1
        padded[dim] = next_multiple(size, shards * (mesh.shape[parts[dim]] if dim in parts else 1))
        spec.append(axis)
    zero_shards = count(mesh, [axis for axis in ZERO_AXES if axis not in parts.values()])
    taken = [dim in parts or axis is not None for dim, axis in enumerate(spec)]
    zero_dim = _zero_dim(padded, taken, zero_shards) if plan.zero else None
    if zero_dim is not None:
        padded[zero_dim] = next_multiple(padded[zero_dim], zero_shards)
    elif plan.zero and zero_shards > 1:
        notes.append("no dim left for ZeRO: replicated over data")
    if layers is not None and not layers.even:
        notes.append(f"layers by stage: {', '.join(map(str, layers.counts))}; all stages hold {layers.longest}")
    if tuple(padded) != info.dims:
        notes.append(f"stored padded: {info.dims} as {tuple(padded)}")
    return Placement(
        info,
        tuple(padded),
        P(*spec),
        zero_dim,
        plan.zero,
        plan.reduce_dtype,
        tuple(notes),
        layers,
        tuple(parts.items()),
    )


def _parts(info: ParamInfo, plan: Plan, mesh: Mesh) -> dict[int, str]:
    """Which dims are split over another manual axis than ZeRO's, and over which."""
    found = {d: axis for d, name in enumerate(info.names) if (axis := plan.rules.axis(name)) in MANUAL_AXES}
    if _is_table(info):
        found[0] = "pipe"
    return {dim: axis for dim, axis in found.items() if axis is not None and mesh.shape[axis] > 1}


def _zero_dim(sizes: list[int], taken: list[bool], shards: int) -> int | None:
    """The dim with the least padding, of several the first: XLA for GPU turns what is gathered along another one. Not
    one that `tensor` splits: its shards would interleave."""
    free = [d for d, is_taken in enumerate(taken) if not is_taken]
    if shards == 1 or not free:
        return None
    return min(free, key=lambda d: (next_multiple(sizes[d], shards) / max(sizes[d], 1), d))


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
    return {path: store_one(x, placements[path]) for path, x in params.items()}


def to_logical(params: Params, placements: Mapping[str, Placement]) -> Params:
    """The inverse of `to_storage`."""
    return {path: logical_one(x, placements[path]) for path, x in params.items()}


def store_one(x: Array, placement: Placement) -> Array:
    """A logical parameter, or what an optimizer keeps for it in its shape, as it is stored."""
    return pad(_by_stage(x, placement.layers), placement.padded)


def logical_one(x: Array, placement: Placement) -> Array:
    """The inverse of `store_one`."""
    x = unpad(x, placement.info.dims)
    if placement.layers is None:
        return x
    x = x.reshape(-1, *x.shape[3:])
    return x if placement.layers.in_order else x[np.asarray(placement.layers.places)]


def _by_stage(x: Array, layers: StageLayers | None) -> Array:
    """Layers in depth order -> `[virtual stage, stage, layer]`, zeros where a stage has fewer."""
    if layers is None:
        return x
    places = layers.chunks * layers.stages * layers.longest
    if not layers.in_order:
        depth = np.full(places, x.shape[0])
        depth[list(layers.places)] = np.arange(x.shape[0])
        x = x.at[depth].get(mode="fill", fill_value=0)
    return x.reshape(layers.chunks, layers.stages, layers.longest, *x.shape[1:])


def logical_sharding(placement: Placement, mesh: Mesh, spec: P) -> NamedSharding:
    """A legal sharding of the logical array: `spec`'s axes where they divide, and none where they do not."""
    dims = list(live_spec(spec, mesh))[len(placement.lead) :]
    kept = [
        axes if axes is not None and size % count(mesh, axes) == 0 else None
        for size, axes in zip(placement.info.dims, dims, strict=True)
    ]
    return NamedSharding(mesh, P(*((None,) if placement.info.stack else ()), *kept))
