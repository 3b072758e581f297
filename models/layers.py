"""Layers that models share: projections, norms and rotary positions. Single-device code with logical names."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

import jaxpar

_fan_in = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


class Projection(nnx.Module):
    """A linear map between groups of dims, e.g. embed -> (heads, head_dim), each with its logical name."""

    def __init__(self, ins: dict[str, int], outs: dict[str, int], *, bias: bool, rngs: nnx.Rngs):
        rows, columns = int(np.prod(list(ins.values()))), int(np.prod(list(outs.values())))
        shape, names = (*ins.values(), *outs.values()), (*ins, *outs)

        def init(key: Array, shape: tuple[int, ...], dtype: type) -> Array:
            # Fan-in counts every input dim, so the matrix is drawn flat.
            return _fan_in(key, (rows, columns), dtype).reshape(shape)

        self.kernel = nnx.Param(jaxpar.named(init, *names)(rngs.params(), shape, jnp.float32))
        zeros = jaxpar.named(nnx.initializers.zeros, *outs)
        # In one assignment: Flax fixes by the first one whether an attribute holds data.
        self.bias = nnx.Param(zeros(rngs.params(), tuple(outs.values()), jnp.float32)) if bias else None
        self.contracted = len(ins)

    def __call__(self, x: Array) -> Array:
        y = jnp.tensordot(x, self.kernel[...], axes=self.contracted)
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - self.bias.ndim)))


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dim, in float32 inside (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, *, name: str = "embed", epsilon: float, rngs: nnx.Rngs):
        self.scale = nnx.Param(jaxpar.named(nnx.initializers.ones, name)(rngs.params(), (dim,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        x32 = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (x32 * inverse * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean) / deviation * scale + bias` over the last dim, in float32 inside (Ba et al., 2016)."""

    def __init__(self, dim: int, *, epsilon: float, rngs: nnx.Rngs):
        ones, zeros = (jaxpar.named(f, "embed") for f in (nnx.initializers.ones, nnx.initializers.zeros))
        self.scale = nnx.Param(ones(rngs.params(), (dim,), jnp.float32))
        self.bias = nnx.Param(zeros(rngs.params(), (dim,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + self.epsilon)
        lead = tuple(range(x.ndim - 1))
        scale, bias = (jnp.expand_dims(p[...].astype(jnp.float32), lead) for p in (self.scale, self.bias))
        return (centered * inverse * scale + bias).astype(x.dtype)


def residual(x_BTD: Array, ctx: jaxpar.Context) -> Array:
    """The residual stream, or what is to be added to it: with sequence-sharded norms, split by positions."""
    return ctx.constrain(x_BTD, None, "norm_positions", None)


def normed(norm: nnx.Module, x_BTD: Array, ctx: jaxpar.Context) -> Array:
    """`norm(x)`, whole: with sequence-sharded norms positions are gathered here, once for all matmuls that follow."""
    return ctx.constrain(residual(norm(x_BTD), ctx), None, None, None)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (Dubey et al., 2024)."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each of the `head_dim / 2` pairs, float32."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_length * frequencies / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (keep + (1 - keep) / scaling.factor)
    return frequencies.astype(np.float32)


def rotate(x: Float[Array, "b t h d"], positions: Int[Array, "b t"], frequencies: np.ndarray) -> Array:
    """Rotary positions (Su et al., 2021): the first half of a head's features pairs with the second half."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
