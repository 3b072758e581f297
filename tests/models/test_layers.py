"""Layers that models share are what their papers say."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers import LayerNorm


def test_layer_norm_is_flax_layer_norm():
    """Otherwise a model with the weights of another program would give other numbers."""
    ours, theirs = LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0)), nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0))
    for norm in (ours, theirs):
        norm.scale.set_value(jnp.arange(1.0, 7.0))
        norm.bias.set_value(jnp.arange(6.0))
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (4, 5, 6)), jnp.float32)
    assert np.allclose(ours(x), theirs(x), atol=1e-5)
