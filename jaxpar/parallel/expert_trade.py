"""What the devices of `expert` send each other: parts of one size, or only as much of each as is filled.

`padded` is `lax.all_to_all`: every backend has it, and it moves the whole buffers. `ragged` is `lax.ragged_all_to_all`,
which moves the filled places alone, and which XLA has for GPUs, not for CPU.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxpar.collectives import vary_nested


@dataclass(frozen=True)
class Trade:
    """Calling it sends part g of `[G, C, D]` to device g, and gives what they send in its place.

    `going` and `coming`, int32[G]: how many of the C places are filled, from the first on; the others arrive as 0.
    Where they are not said, the whole parts travel.
    """

    going: Int[Array, " G"] | None = None
    coming: Int[Array, " G"] | None = None

    @property
    def back(self) -> "Trade":
        """The way that what has come goes home, and gradients go."""
        return Trade(self.coming, self.going)

    def __call__(self, rows: Float[Array, "G C D"]) -> Float[Array, "G C D"]:
        if self.going is None or self.coming is None:
            return _padded(rows)
        return _ragged(rows, self.going, self.coming)


def all_to_all(x: Array) -> Array:
    """`[G, ...]`: part g to device g, and what they send in its place."""
    return lax.all_to_all(x, "expert", 0, 0, tiled=True)


def device_problems(device: jax.Device) -> list[str]:
    """Why this device cannot send parts of different sizes."""
    if device.platform == "gpu":
        return []
    return [f"expert_exchange='ragged' needs GPUs, found {device.platform}: set expert_exchange='padded'"]


@jax.custom_vjp
def _padded(rows: Array) -> Array:
    return all_to_all(rows)


# Its own transpose.
_padded.defvjp(lambda rows: (all_to_all(rows), None), lambda _, d_rows: (all_to_all(d_rows),))


@jax.custom_vjp
def _ragged(rows: Array, going: Array, coming: Array) -> Array:
    return _ragged_all_to_all(rows, going, coming)


def _ragged_fwd(rows: Array, going: Array, coming: Array) -> tuple[Array, tuple[Array, Array]]:
    return _ragged_all_to_all(rows, going, coming), (going, coming)


def _ragged_bwd(sizes: tuple[Array, Array], d_rows: Array) -> tuple[Array, None, None]:
    going, coming = sizes
    return _ragged_all_to_all(d_rows, coming, going), None, None


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


def _ragged_all_to_all(rows: Array, going: Array, coming: Array) -> Array:
    devices, most, features = rows.shape
    flat = rows.reshape(devices * most, features)
    first = most * jnp.arange(devices, dtype=jnp.int32)
    # Of the receivers' buffers, the part that is for this device.
    there = jnp.full(devices, most, jnp.int32) * lax.axis_index("expert")
    empty = vary_nested(jnp.zeros_like(flat))
    came = lax.ragged_all_to_all(flat, empty, first, going, there, coming, axis_name="expert")
    return came.reshape(rows.shape)
