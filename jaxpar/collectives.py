"""Thin named wrappers of the collectives that jaxpar writes itself.

XLA's partitioner gathers the operand of an `all_gather` or `psum_scatter` over the automatic `tensor` axis first,
whatever the constraints around it. Each such collective therefore runs in a nested `shard_map` over only `tensor`,
in which the operand is the device's own tensor shard.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MANUAL_AXES

Axes = tuple[str, ...]


def on_tensor_shards(
    f: Callable[..., Array], in_specs: Sequence[P] | P, out_specs: P, always: bool = False
) -> Callable[..., Array]:
    """`f` on each device's tensor shard; the specs name the dims split over `tensor`, and no other axis.

    Where `tensor` has size 1, `f` itself, unless it is `always` to be nested.
    """
    if not (always or live(("tensor",))):
        return f
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"tensor"})


def live(axes: Axes) -> Axes:
    """The axes that have more than one device; the others emit no collective, and nothing varies over them."""
    return tuple(a for a in axes if axis_size(a) > 1)


def live_spec(spec: P, mesh: Mesh) -> P:
    """`spec` without the axes that the mesh lacks or that have size 1."""

    def keep(axes: str | Axes | None) -> Axes | None:
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        return tuple(a for a in names if mesh.shape.get(a, 1) > 1) or None

    return P(*(keep(axes) for axes in spec))


def sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """`spec` on this mesh, by its live axes."""
    return NamedSharding(mesh, live_spec(spec, mesh))


def all_gather(x: Array, axes: Axes, dim: int, tensor_spec: P) -> Array:
    """Concatenates the shards of `dim` over `axes`; bytes: the output's."""

    def gather(shard: Array) -> Array:
        return lax.all_gather(shard, live(axes), axis=dim, tiled=True)

    return on_tensor_shards(gather, tensor_spec, tensor_spec)(x)


def psum_scatter(x: Array, axes: Axes, dim: int, tensor_spec: P, dtype: Any) -> Array:
    """Sums over `axes` and leaves each device its part of `dim`; bytes: the input's in `dtype`, in which it sums."""

    def scatter(shard: Array) -> Array:
        return lax.psum_scatter(shard, live(axes), scatter_dimension=dim, tiled=True)

    return _summed_in(dtype, scatter, tensor_spec)(x)


def psum(x: Array, axes: Axes) -> Array:
    """Sums over `axes`. Keeps the tensor sharding by itself."""
    return lax.psum(x, live(axes)) if live(axes) else x


def psum_in(x: Array, axes: Axes, tensor_spec: P, dtype: Any) -> Array:
    """`psum` that moves and sums `dtype`; the result has that of `x`."""
    if not live(axes) or x.dtype == dtype:
        return psum(x, axes)
    return _summed_in(dtype, lambda shard: lax.psum(shard, live(axes)), tensor_spec)(x)


def _summed_in(dtype: Any, reduce: Callable[[Array], Array], tensor_spec: P) -> Callable[[Array], Array]:
    """XLA for CPU ends the process at a sum of bfloat16 in a region that is only partly manual: there it is nested in
    a manual one, also where `tensor` has size 1."""
    nested = on_tensor_shards(reduce, tensor_spec, tensor_spec, always=jnp.dtype(dtype).itemsize < 4)
    return lambda x: nested(x.astype(dtype)).astype(x.dtype)


def from_stage[T](tree: T, stage: int) -> T:
    """What this stage of `pipe` has, on all of them; summed with zeros in at least float32."""
    if not live(("pipe",)):
        return tree
    here = lax.axis_index("pipe") == stage

    def share(x: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return psum(jnp.where(here, x, jnp.zeros_like(x)).astype(wide), ("pipe",)).astype(x.dtype)

    return jax.tree.map(share, tree)


def to_neighbour[T](tree: T, step: int, ring: bool) -> T:
    """Every stage of `pipe` sends to the one `step` (1 or -1) on; `ring`: also from one end to the other."""
    stages = axis_size("pipe")
    pairs = [(s, (s + step) % stages) for s in range(stages) if ring or 0 <= s + step < stages]
    return jax.tree.map(lambda x: lax.ppermute(x, "pipe", pairs), tree)


def axis_size(axis: str) -> int:
    """How many devices the axis of the mesh in scope has; 1 where there is no mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def axis_index(axis: str) -> Array | int:
    """This device's place on the axis."""
    return lax.axis_index(axis) if live((axis,)) else 0


def behind(lead: int, spec: P) -> P:
    """`spec` for an array with `lead` more dims in front."""
    return P(*(None,) * lead, *spec)


def constrain(x: Array, tensor_spec: P) -> Array:
    """Tells XLA how `x` lies over `tensor`; nothing when `tensor` has size 1."""
    return lax.with_sharding_constraint(x, tensor_spec) if live(("tensor",)) else x


def vary[T](tree: T, axes: Axes = MANUAL_AXES) -> T:
    """Marks every leaf as varying over the manual `axes`, so that no gradient is summed over them behind our back."""
    manual = jax.sharding.get_abstract_mesh().manual_axes

    def cast(x: Array) -> Array:
        missing = tuple(a for a in live(axes) if a in manual and a not in _varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def vary_nested[T](tree: T) -> T:
    """`vary`, and over `tensor` as well where a region is nested that is manual over it."""
    return vary(tree, (*MANUAL_AXES, "tensor"))


def _varying(x: Array) -> frozenset[str]:
    kind = jax.typeof(x)
    # jax 0.12 moved the mark.
    marks = getattr(kind, "mat", None)
    return frozenset(marks.varying if marks is not None else kind.vma)
