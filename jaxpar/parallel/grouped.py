"""Matrix products of groups of rows, each with its own kernel: the matmuls of a mixture of experts.

Rows are sorted by group, and each group is filled up to whole tiles, so that a tile has one kernel. Compiled work is
that of the tiles, whatever the number of experts; `lax.ragged_dot` is dense work for every expert on CPU and, outside
of Pallas, on GPU. Backward the gradient of each kernel is added up in place, tile by tile. With `pallas`
the three products are one launch each, for Hopper (`grouped_kernel.py`); tiles are then whole blocks of its rows.

Letters: N rows, S rows of all tiles, T rows of a tile, E groups, D and F features.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxpar.collectives import vary_nested
from jaxpar.parallel import grouped_kernel

TILE = 128
LEAST = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """How rows lie in tiles.

    Attributes:
      source: int32[S], the row that lies in each place; N, past the end, where a tile is not full.
      place: int32[N], where each row lies; S, past the end, for a row of no group.
      group: int32[tiles], the group of each tile.
    """

    source: Int[Array, " S"]
    place: Int[Array, " N"]
    group: Int[Array, " tiles"]


def tile_size(rows: int, groups: int, least: int = LEAST) -> int:
    """Rows of a tile: as many as add at most a sixth to the rows, a twelfth on average; a multiple of `least`."""
    return max(least, min(TILE, rows // (6 * groups) // least * least))


def tile_count(rows: int, groups: int, least: int = LEAST) -> int:
    """How many tiles hold so many rows, however they are spread over the groups."""
    return -(-rows // tile_size(rows, groups, least)) + groups


def tiles(group: Int[Array, " N"], groups: int, pallas: bool = False) -> Tiles:
    """Sorts rows of these groups into tiles; rows of group `groups` or more lie in none."""
    rows, least = group.shape[0], grouped_kernel.LEAST if pallas else LEAST
    size = tile_size(rows, groups, least)
    count = tile_count(rows, groups, least)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    sizes = jnp.sum(group[:, None] == jnp.arange(groups)[None, :], axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(-(-sizes // size))
    past = jnp.sum(ends[None, :] <= jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    tile_group = jnp.minimum(past, groups - 1)
    first_place = (ends - -(-sizes // size)) * size
    first_row = jnp.cumsum(sizes) - sizes
    within = jnp.arange(count * size) - jnp.repeat(first_place[tile_group], size)
    of_place = jnp.repeat(tile_group, size)
    filled = (within >= 0) & (within < sizes[of_place]) & (jnp.arange(count * size) < ends[-1] * size)
    source = jnp.where(filled, order.at[first_row[of_place] + within].get(mode="fill", fill_value=rows), rows)
    rank = jnp.zeros(rows, jnp.int32).at[order].set(jnp.arange(rows, dtype=jnp.int32))
    own = jnp.minimum(group, groups - 1)
    place = jnp.where(group < groups, first_place[own] + rank - first_row[own], count * size)
    return Tiles(source.astype(jnp.int32), place.astype(jnp.int32), tile_group)


def permuted(x: Float[Array, "n d"], index: Int[Array, " m"], inverse: Int[Array, " n k"]) -> Float[Array, "m d"]:
    """`x[index]`, zeros past its end, where row `n` of `x` goes to the places `inverse[n]` and no other.

    Its gradient is a gather too: a scatter would take the rows one by one.
    """
    return _permuted(x, index, inverse)


@jax.custom_vjp
def _permuted(x, index, inverse):  # type: ignore[no-untyped-def]
    return take(x, index)


def _permuted_bwd(inverse, g):  # type: ignore[no-untyped-def]
    parts = take(g, inverse.reshape(-1)).reshape(*inverse.shape, -1)
    return jnp.sum(parts, axis=1, dtype=jnp.float32).astype(g.dtype), None, None


_permuted.defvjp(lambda x, index, inverse: (take(x, index), inverse), _permuted_bwd)


def take(x: Array, index: Array) -> Array:
    """Rows of `x`; zeros past its end."""
    return x.at[index].get(mode="fill", fill_value=0)


def grouped_matmul(
    x: Float[Array, "S D"], kernel: Float[Array, "E D F"], group: Int[Array, " tiles"], pallas: bool = False
) -> Float[Array, "S F"]:
    """`x[s] @ kernel[group of s's tile]`, summed in float32, in the dtype of `x`.

    `pallas`: by the kernels for Hopper, on tiles made for them. Raises `PlanError` for what they do not multiply.
    """
    if pallas:
        grouped_kernel.check(x, kernel)
    return _matmul(pallas, x, kernel, group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(pallas, x, kernel, group):  # type: ignore[no-untyped-def]
    if pallas:
        return vary_nested(grouped_kernel.multiply(x, kernel, group, transposed=False))
    return _by_tile("td,df->tf", x, kernel, group)


def _matmul_fwd(pallas, x, kernel, group):  # type: ignore[no-untyped-def]
    return _matmul(pallas, x, kernel, group), (x, kernel, group)


def _matmul_bwd(pallas, saved, dy):  # type: ignore[no-untyped-def]
    x, kernel, group = saved
    if pallas:
        dx = grouped_kernel.multiply(dy, kernel, group, transposed=True)
        return *vary_nested((dx, grouped_kernel.kernel_gradient(x, dy, group, kernel.shape[0]))), None
    dx = _by_tile("tf,df->td", dy, kernel, group)
    return dx.astype(x.dtype), _kernel_gradient(x, dy, group, kernel.shape).astype(kernel.dtype), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _by_tile(spec: str, x, kernel, group):  # type: ignore[no-untyped-def]
    x_PTD = x.reshape(group.shape[0], -1, x.shape[1])

    def multiply(x_TD, one):  # type: ignore[no-untyped-def]
        return _dot(spec, x_TD, one).astype(x.dtype)

    def read(_, inputs):  # type: ignore[no-untyped-def]
        x_TD, g = inputs
        return None, multiply(x_TD, _at(kernel, g))

    def keep(held, inputs):  # type: ignore[no-untyped-def]
        x_TD, g, first = inputs
        held = lax.cond(first, lambda held: _at(kernel, g), lambda held: held, held)
        return held, multiply(x_TD, held)

    def keeping(x_PTD, group):  # type: ignore[no-untyped-def]
        start = vary_nested(jnp.zeros(kernel.shape[1:], kernel.dtype))
        first = jnp.concatenate([jnp.ones_like(group[:1], bool), group[1:] != group[:-1]])
        return lax.scan(keep, start, (x_PTD, group, first))[1]

    def reading(x_PTD, group):  # type: ignore[no-untyped-def]
        return lax.scan(read, None, (x_PTD, group))[1]

    # A tile on CPU copies its kernel, unless the last one's is kept; on GPU a condition in a loop waits for the host.
    return lax.platform_dependent(x_PTD, group, cpu=keeping, default=reading).reshape(x.shape[0], -1)


def _kernel_gradient(x, dy, group, shape):  # type: ignore[no-untyped-def]
    x_PTD, dy_PTF = (a.reshape(group.shape[0], -1, a.shape[1]) for a in (x, dy))

    def tile(total, inputs):  # type: ignore[no-untyped-def]
        x_TD, dy_TF, g = inputs
        new = _at(total, g) + _dot("td,tf->df", x_TD, dy_TF)
        return lax.dynamic_update_index_in_dim(total, new, g, 0), None

    start = vary_nested(jnp.zeros(shape, jnp.float32))
    return lax.scan(tile, start, (x_PTD, dy_PTF, group))[0]


def _at(kernel, group):  # type: ignore[no-untyped-def]
    return lax.dynamic_index_in_dim(kernel, group, 0, keepdims=False)


def _dot(spec: str, a, b):  # type: ignore[no-untyped-def]
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
