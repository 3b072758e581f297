"""The lookup of a vocabulary-sharded embedding table.

Each device looks up the part it holds, and the parts are summed over `tensor`. Left alone, XLA gathers the whole table
where the result is sharded by positions. The backward is written out, since a nested `shard_map` cannot be
differentiated inside the manual region.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxpar import collectives
from jaxpar.axis_rules import next_multiple
from jaxpar.parallel import vocabulary

_TABLE = P("tensor", None)


def embedding_lookup(table: Float[Array, "v d"], ids: Int[Array, "*n"]) -> Float[Array, "*n d"]:
    """`table[ids]`, the table split over `tensor` by vocabulary. Ids outside it give zeros: check them before.

    In a pipeline each stage looks up what lies in its slice, and the parts are summed over `pipe`.
    """
    table, _, start = vocabulary.slice_of(table)
    rows = table.shape[0]
    padded = jnp.pad(table, [(0, next_multiple(rows, collectives.axis_size("tensor")) - rows), (0, 0)])
    if start is None:
        return _lookup(padded.shape[0], padded, ids)
    return _sum_over_stages(_lookup(padded.shape[0], padded, _places(ids - start, rows, padded.shape[0])))


@jax.custom_vjp
def _sum_over_stages(x: Array) -> Array:
    return collectives.vary(collectives.psum(x, ("pipe",)))


# Every stage has the whole gradient already.
_sum_over_stages.defvjp(lambda x: (_sum_over_stages(x), None), lambda _, grad: (grad,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(vocab: int, table: Array, ids: Array) -> Array:
    def local(shard: Array, ids: Array) -> Array:
        found = shard.at[_local_ids(ids, shard.shape[0])].get(mode="fill", fill_value=0)
        return collectives.psum(found, ("tensor",))

    return collectives.on_tensor_shards(local, (_TABLE, P()), P())(table, ids)


def _lookup_fwd(vocab: int, table: Array, ids: Array) -> tuple[Array, Array]:
    return _lookup(vocab, table, ids), ids


def _lookup_bwd(vocab: int, ids: Array, grad: Array) -> tuple[Array, None]:
    rows = vocab // collectives.axis_size("tensor")

    def local(grad: Array, ids: Array) -> Array:
        zeros = collectives.vary(jnp.zeros((rows, grad.shape[-1]), grad.dtype))
        return zeros.at[_local_ids(ids, rows)].add(grad, mode="drop")

    return collectives.on_tensor_shards(local, (P(), P()), _TABLE)(grad, ids), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _local_ids(ids: Array, rows: int) -> Array:
    """Places in this device's part of the table."""
    return _places(ids - collectives.axis_index("tensor") * rows, rows, rows)


def _places(places: Array, rows: int, past_the_end: int) -> Array:
    """What is absent lies past the end: a negative place would count from there, and another part may follow."""
    return jnp.where((places >= 0) & (places < rows), places, past_the_end)
