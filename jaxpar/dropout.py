"""Counter-based random bits, for dropout and noise: functions of the key and of an element's global index."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32


def keep_mask(
    key: Array, rows: Int[Array, " b"], index: Int[Array, " t"] | None, shape: tuple[int, ...], rate: float
) -> Bool[Array, "b ..."]:
    """True where an element is kept, with probability `1 - rate`."""
    return _bits(key, rows, index, shape) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def uniform(
    key: Array, rows: Int[Array, " b"], index: Int[Array, " t"] | None, shape: tuple[int, ...]
) -> Float[Array, "b ..."]:
    """Float32, from 0 to below 1."""
    return (_bits(key, rows, index, shape) >> 8).astype(jnp.float32) * 2.0**-24


def _bits(
    key: Array, rows: Int[Array, " b"], index: Int[Array, " t"] | None, shape: tuple[int, ...]
) -> UInt32[Array, "b ..."]:
    """One threefry call for each (row, position), then an integer mix over the features: cheap, and free of
    communication. `index` None: everything but rows counts as features.
    """
    hashes = _fold(key, rows)
    leading = 1
    if index is not None:
        hashes = jax.vmap(lambda k: _fold(k, index))(hashes)
        leading = 2
    words = jax.random.key_data(hashes)[..., 0]
    features = math.prod(shape[leading:])
    counter = jax.lax.iota(jnp.uint32, features).reshape((1,) * leading + shape[leading:])
    words = words.reshape(words.shape + (1,) * (len(shape) - leading))
    return mix(words ^ (counter * jnp.uint32(0x9E3779B9)))


def _fold(key: Array, data: Int[Array, " n"]) -> Array:
    return jax.vmap(lambda d: jax.random.fold_in(key, d))(data)


def mix(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """The finalizer of MurmurHash3 (Appleby, 2011): every input bit flips every output bit about half the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
