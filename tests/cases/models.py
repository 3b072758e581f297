"""Models so small that their right loss and gradient can be worked out by hand."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import Plan, Program


class Times(nnx.Module):
    """`x * scale`; the scale starts at `start`."""

    def __init__(self, start=1.0, *, rngs):
        self.scale = nnx.Param(jnp.float32(start))

    def __call__(self, x, ctx):
        return x * self.scale[...]


class GivenLosses(nnx.Module):
    """Its token losses are `losses * scale`: the mean, and the gradient of the scale, are the weighted mean of them."""

    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Times, 1, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["losses"]

    def head(self, x, batch, ctx):
        return {"cross_entropy": jnp.sum(batch["weights"] * x)}

    def terms(self, batch):
        return {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"]))}


def given_losses(mesh: str, **options) -> Program:
    axes = {"losses": ("rows", "positions"), "weights": ("rows", "positions")}
    return Program(GivenLosses, optax.sgd(0.1), Plan(mesh, **options), batch_axes=axes)


def losses_and_weights(losses, weights) -> dict[str, np.ndarray]:
    losses, weights = np.broadcast_arrays(np.float32(losses), np.float32(weights))
    return {"losses": losses, "weights": weights}
