"""Ring buffers: arrays with slots in front, read and written in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar import collectives


def empty(x: Any, slots: int) -> Any:
    """Buffers of so many slots for trees like `x`."""
    return jax.tree.map(lambda a: collectives.vary(jnp.zeros((slots, *a.shape), a.dtype)), x)


def take(buffer: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b: read(b, slot), buffer)


def put(buffer: Any, x: Any, slot: Array, valid: Array | None) -> Any:
    """With `x` in the slot, where it is `valid`; a negative slot is 0, for what is not."""
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(lambda b, new: write(b, select(valid, new, read(b, slot)), slot), buffer, x)


def select[T](valid: Array | None, new: T, old: T) -> T:
    """`new` where `valid`, else `old`; None: valid everywhere."""
    return new if valid is None else jax.tree.map(lambda n, o: jnp.where(valid, n, o), new, old)


def masked[T](valid: Array | None, tree: T) -> T:
    """Zeros where it is not valid."""
    return select(valid, tree, jax.tree.map(jnp.zeros_like, tree))


def read(buffer: Array, *slots: Array) -> Array:
    """`buffer[slots]`, by as many leading dims."""
    start = _start(buffer, slots)
    sizes = (*(1,) * len(slots), *buffer.shape[len(slots) :])
    return lax.dynamic_slice(buffer, start, sizes).reshape(buffer.shape[len(slots) :])


def write(buffer: Array, x: Array, *slots: Array) -> Array:
    """Puts `x` at `buffer[slots]`."""
    return lax.dynamic_update_slice(buffer, x.reshape((1,) * len(slots) + x.shape), _start(buffer, slots))


def cut(buffers: list[Array], slot: Array) -> list[Array]:
    """Buffers of this slot alone."""
    return [lax.dynamic_slice_in_dim(buffer, slot, 1) for buffer in buffers]


def paste(buffers: list[Array], parts: list[Array], slot: Array) -> list[Array]:
    """Puts what `cut` has cut back in its place."""
    return [lax.dynamic_update_slice_in_dim(b, part, slot, 0) for b, part in zip(buffers, parts, strict=True)]


def _start(buffer: Array, slots: tuple[Array, ...]) -> list[Array]:
    return [*slots, *(jnp.zeros((), jnp.int32) for _ in range(buffer.ndim - len(slots)))]
