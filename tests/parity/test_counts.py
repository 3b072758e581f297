"""What a step counts: valid tokens, rows, skipped steps."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program
from jaxpar.testing import run_on_enough_devices


@pytest.fixture(scope="module")
def run():
    config = replace(TOY, num_layers=2)
    plan = Plan("data=4,tensor=2", zero=2, microbatches=2)
    return run_on_enough_devices(Program(config.build, optax.adamw(1e-2, weight_decay=0.1), plan))


@pytest.mark.parametrize(("kind", "count"), [("ones", 512), ("one token", 1), ("masked", 256)])
def test_the_weight_of_a_step_is_its_number_of_valid_tokens(run, kind, count):
    """Otherwise the loss is divided by something else than what it sums over."""
    _, metrics = run.step(run.init(0), run.put(make_batch(kind, 16, 64)))
    assert float(metrics["weight/cross_entropy"]) == count
    assert float(metrics["skipped"]) == 0
    assert float(metrics["loss"]) == float(metrics["cross_entropy"]) > 0


def test_a_step_in_which_nothing_counts_changes_nothing_and_is_counted(run):
    """Otherwise an all-padding batch gives NaN, or decays the weights, or goes unseen."""
    before = jax.device_get(run.logical_params(run.init(0).params))
    batch = make_batch("ones", 16, 64)
    batch["weights"] = np.zeros_like(batch["weights"])
    state, metrics = run.step(run.init(0), run.put(batch))
    assert {k: float(v) for k, v in metrics.items()} == {
        "loss": 0,
        "cross_entropy": 0,
        "weight/cross_entropy": 0,
        "grad_norm": 0,
        "skipped": 1,
    }
    assert (int(state.step), int(state.skipped)) == (1, 1)
    after = jax.device_get(run.logical_params(state.params))
    assert all(np.array_equal(after[path], x) for path, x in before.items())


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(run):
    """Otherwise one bad batch would end the training."""
    batch = make_batch("ones", 16, 64)
    batch["weights"][3, 7] = np.inf
    state, metrics = run.step(run.init(0), run.put(batch))
    assert float(metrics["skipped"]) == 1 and int(state.skipped) == 1
    assert all(np.isfinite(x).all() for x in jax.device_get(run.logical_params(state.params)).values())
