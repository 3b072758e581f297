"""Dropout masks differ where they must, and are equal, bit by bit, where they must be.

A mask is read off the gradient: `sum(dropout(ones) * probe)` has the mask as the gradient of the probe, taken from
what the backward uses; a checksum of it comes with the totals, taken from what the forward uses.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import ModelError, Plan, Program
from jaxpar.testing import run_on_enough_devices

ROWS, LENGTH, DIM, RATE = 16, 32, 8, 0.5
NUMBERS = np.random.default_rng(0).integers(0, 100, (ROWS, LENGTH, DIM)).astype(np.float32)


class Probes(nnx.Module):
    """Two calls of dropout in one layer; the second's activation is split over `tensor`."""

    def __init__(self, *, rngs):
        self.whole, self.split = (
            nnx.Param(jaxpar.named(nnx.initializers.zeros, None, None, name)(rngs.params(), NUMBERS.shape, jnp.float32))
            for name in (None, "mlp")
        )

    def __call__(self, x, ctx):
        ones = jnp.ones((*x.shape[:2], DIM))
        whole = ctx.dropout(ones, RATE)
        split = ctx.dropout(ctx.constrain(ones, None, None, "mlp"), RATE)
        numbers = jnp.asarray(NUMBERS)[ctx.rows]
        products = whole * self.whole[...][ctx.rows] + split * self.split[...][ctx.rows]
        return x + products.sum(axis=2), {"checksum": jnp.sum(whole * numbers) + jnp.sum(3 * split * numbers)}


class Masks(nnx.Module):
    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Probes, 3, rngs=rngs)
        self.embedded = nnx.Param(jnp.zeros((1, *NUMBERS.shape)))

    def embed(self, batch, ctx):
        mask = ctx.dropout(jnp.ones((*batch["x"].shape, DIM)), RATE)
        return batch["x"] + jnp.sum(mask * self.embedded[0][ctx.rows], axis=2)

    def head(self, x, batch, ctx):
        return {"probes": jnp.sum(x)}

    def terms(self, batch):
        # Weights of 1 in all: the gradients are the masks, not scaled.
        share = jnp.float32(batch["x"].shape[0] / ROWS)
        return {"probes": jaxpar.Term(share), "checksum": jaxpar.Term(share, coef=0.0)}


def masks(plan: Plan, step: int = 0, seed: int = 0):
    """-> path -> the mask of each layer, [layer, row, position, feature]; the checksum; the gradients as stored."""
    axes = {"x": ("rows", "positions")}
    run = run_on_enough_devices(Program(Masks, optax.sgd(0.1), plan, batch_axes=axes))
    state = replace(run.init(seed), step=jnp.int32(step))
    grads, metrics = run.gradients(state, run.put({"x": np.zeros((ROWS, LENGTH), np.float32)}))
    found = jax.device_get(run.logical_params(grads))
    return {path.rpartition(".")[2]: np.asarray(g) for path, g in found.items()}, float(metrics["checksum"]), grads


@pytest.fixture(scope="module")
def alone():
    return masks(Plan("data=1"))[:2]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=8", {"zero": 3}),
        ("data=4", {"microbatches": 2}),
        ("data=2,tensor=4", {"microbatches": 4, "remat": "dots"}),
        ("data=4,tensor=2", {"remat": "full", "zero": 1}),
        ("tensor=8", {"remat": "full"}),
    ],
)
def test_a_mask_is_bitwise_one_devices_on_every_mesh_and_when_recomputed(alone, mesh, options):
    """Otherwise a mesh, a microbatch or remat changes what is trained; replicas of an activation drift apart."""
    found, checksum, grads = masks(Plan(mesh, **options))
    assert checksum == alone[1]
    for path, mask in alone[0].items():
        assert np.array_equal(found[path], mask)
    for grad in grads.values():
        copies: dict = {}
        for shard in grad.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(np.array_equal(copy, same[0]) for same in copies.values() for copy in same)


def test_rows_layers_calls_steps_and_seeds_have_masks_that_know_nothing_of_each_other(alone):
    """Otherwise units fall out together, and dropout regularises less than its rate says."""
    whole, split = alone[0]["whole"], alone[0]["split"]
    drawn = [
        *whole,
        *split,
        *alone[0]["embedded"],
        masks(Plan("data=1"), step=1)[0]["whole"][0],
        masks(Plan("data=1"), seed=1)[0]["whole"][0],
    ]
    assert {float(v) for v in np.unique(whole)} == {0.0, 1 / (1 - RATE)}
    # 4,096 elements: four standard deviations are 0.03.
    assert all(abs((mask > 0).mean() - RATE) < 0.035 for mask in drawn)
    pairs = [(drawn[i], drawn[j]) for i in range(len(drawn)) for j in range(i)]
    # Rows of two shards, neighbouring positions, neighbouring features: of all layers, to have as many elements.
    both = np.stack([*whole, *split])
    pairs += [(both[:, :8], both[:, 8:]), (both[:, :, 1:], both[:, :, :-1]), (both[..., 1:], both[..., :-1])]
    assert all(abs((a == b).mean() - 0.5) < 0.035 for a, b in pairs)


def test_a_dropout_layer_of_flax_is_refused_by_name():
    """Otherwise its mask would be the same on every data shard, or its state be lost."""

    class Layer(nnx.Module):
        def __init__(self, *, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, ctx):
            return self.drop(x)

    class Model(Masks):
        def __init__(self, *, rngs):
            self.blocks = jaxpar.stack(Layer, 2, rngs=rngs)

    with pytest.raises(ModelError, match=r"blocks\.drop\.rngs.*use ctx\.dropout\(x, rate\) in place of nnx\.Dropout"):
        Program(Model, optax.sgd(0.1), Plan()).validate(devices=1)
