"""Loss and gradient are sums over the whole step, divided once."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import TOY
from jaxpar import Plan, Program
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from tests.cases.models import Times, given_losses, losses_and_weights
from tests.parity.references import assert_equals_one_device


def test_accumulated_loss_is_no_mean_of_means():
    """Otherwise the loss depends on how the step is cut: 2.5 as a mean of means, 5.0 as a sum of means."""
    batch = losses_and_weights([[4.0] * 8, [1.0] * 8], [[1] + [0] * 7, [1] * 7 + [0]])
    for microbatches in (1, 2):
        run = run_on_enough_devices(given_losses("data=1", microbatches=microbatches))
        loss, grads = run_loss_and_grads(run, batch)
        assert loss == 1.375
        assert grads["blocks.scale"] == np.float32(1.375)


def test_shards_with_different_numbers_of_valid_tokens_weigh_by_token():
    """Otherwise a token counts for more where it has few neighbours: 4.5 in place of 204/36."""
    shard = np.arange(1, 9)
    batch = losses_and_weights(shard[:, None], np.arange(8)[None, :] < shard[:, None])
    loss, grads = run_loss_and_grads(run_on_enough_devices(given_losses("data=8")), batch)
    assert loss == pytest.approx(204 / 36, rel=1e-6)
    assert grads["blocks.scale"] == pytest.approx(204 / 36, rel=1e-6)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_a_decoder_gives_the_same_loss_and_gradients_for_any_number_of_microbatches(microbatches):
    """Otherwise accumulation changes what is trained."""
    assert_equals_one_device(replace(TOY, num_layers=2), Plan("data=2", microbatches=microbatches), ["uneven"], rows=16)


def test_evaluation_divides_once():
    """Otherwise a small batch counts as much as a big one: 6.0 in place of 92 / 10."""
    run = run_on_enough_devices(given_losses("data=1"))
    batches = [losses_and_weights([[2.0]], [[1.0]]), losses_and_weights([[10.0]] * 9, [[1.0]] * 9)]
    result = run.evaluate(run.init(0), batches)
    assert result["loss"] == pytest.approx(9.2, rel=1e-6)
    assert result["weight/cross_entropy"] == 10 and result["rows"] == 10


class RowCounter(nnx.Module):
    """One term per row id: how often was it seen?"""

    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Times, 1, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        seen = jnp.zeros(19).at[batch["id"]].add(1.0)
        return {f"row {i}": seen[i] for i in range(19)} | {"mean": jnp.sum(x)}

    def terms(self, batch):
        rows = jnp.float32(batch["id"].shape[0])
        return {f"row {i}": jaxpar.Term(rows, coef=0.0) for i in range(19)} | {"mean": jaxpar.Term(rows)}


def test_evaluation_sees_every_row_once_on_eight_devices():
    """Otherwise a ragged last batch is dropped, or filled up with rows that count twice."""
    axes = {"x": ("rows", None), "id": ("rows",)}
    run = run_on_enough_devices(Program(RowCounter, optax.sgd(0.1), Plan("data=8", zero=3), batch_axes=axes))
    x = np.random.default_rng(0).normal(size=(19, 1)).astype(np.float32)
    rows = {"x": x, "id": np.arange(19, dtype=np.int32)}
    batches = [{name: a[i : i + 8] for name, a in rows.items()} for i in (0, 8, 16)]
    result = run.evaluate(run.init(0), batches)
    assert [round(result[f"row {i}"] * 19) for i in range(19)] == [1] * 19
    assert result["rows"] == 19
    assert result["loss"] == pytest.approx(float(x.mean()), rel=1e-5)
