"""The lookup of a vocabulary-sharded embedding table."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def embedding_lookup(table: Float[Array, "v d"], ids: Int[Array, "*n"]) -> Float[Array, "*n d"]:
    """`table[ids]`; the table may be split over `tensor` by vocabulary. Ids outside it give NaN: check them before."""
    return jnp.take(table, ids, axis=0)
