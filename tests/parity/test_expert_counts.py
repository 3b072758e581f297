"""What is counted of experts is what was done, once: under remat, pipelines, accumulation, evaluation and padding."""

from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import Capacity, Plan, Program
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from tests.parity.test_experts import CONFIG, LENGTH, ROWS, batch
from tests.parity.test_replicas import strays

COUNTED = replace(CONFIG, bias_rate=0.01, log_load=True)
PAIRS = ROWS * LENGTH * CONFIG.experts_per_token * CONFIG.num_layers


@lru_cache
def one_step(plan: Plan):
    run = run_on_enough_devices(Program(COUNTED.build, optax.adam(0.1), plan))
    state = run.init(0)
    before = jax.tree.map(np.asarray, run.to_logical(state).params)
    state, metrics = run.step(state, run.put(batch("uneven")))
    return run, before, state, {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize(
    "plan",
    [
        Plan("data=1"),
        Plan("data=2,expert=2,tensor=2", microbatches=2, remat="full"),
        Plan("expert=2,pipe=2,seq=2", microbatches=4, zero=1),
    ],
    ids=str,
)
def test_counts_and_what_they_steer_are_the_same_on_every_mesh(plan):
    """Otherwise a bias follows tokens that were counted twice, or those of one device alone."""
    run, before, state, metrics = one_step(plan)
    alone = one_step(Plan("data=1"))[3]
    assert metrics["weight/routed"] == PAIRS and metrics["routed"] == 1.0 and metrics["dropped"] == 0.0
    load = [metrics[f"load/{e}"] for e in range(COUNTED.num_experts)]
    assert sum(load) == pytest.approx(1.0) and load == [alone[f"load/{e}"] for e in range(COUNTED.num_experts)]
    path = "blocks.experts.router.bias"
    counts = run_loss_and_grads(run, batch("uneven"))[1][path]
    assert (counts.sum(axis=0) == PAIRS * np.asarray(load)).all()
    expected = 0.01 * np.sign(counts.mean(axis=-1, keepdims=True) - counts)
    after = np.asarray(run.to_logical(state).params[path])
    assert (after - before[path] == expected.astype(np.float32)).all() and np.abs(after).max() > 0


def test_neither_the_optimizer_nor_the_norm_sees_counts():
    """Otherwise clipping would scale all gradients by how many tokens there were."""
    run, _, state, metrics = one_step(Plan("data=2,expert=2,tensor=2", microbatches=2, remat="full"))
    grads = run_loss_and_grads(run, batch("uneven"))[1]
    learned = [g for path, g in grads.items() if not path.endswith("bias")]
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in learned)), 1e-5)
    assert not any(
        "bias" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
    )


def test_evaluation_leaves_counts_and_biases_alone():
    """Otherwise experts would be balanced for the validation set."""
    run, _, state, _ = one_step(Plan("expert=2,pipe=2,seq=2", microbatches=4, zero=1))
    before = jax.tree.map(np.asarray, run.to_logical(state).params)
    found = run.evaluate(state, [batch("uneven")])
    after = jax.tree.map(np.asarray, run.to_logical(state).params)
    assert all((before[path] == after[path]).all() for path in before)
    assert float(found["routed"]) == 1.0


def test_padding_is_not_routed_and_takes_no_place():
    """Otherwise padding uses up capacity and changes what is learned of the router: 384 pairs here, not 512."""
    config = replace(CONFIG, num_layers=1, num_experts=4)
    short = make_batch("dense", 4, config.vocab_size, 48)
    numbered = {"segments": np.ones((4, 48), np.int32), "positions": np.tile(np.arange(48, dtype=np.int32), (4, 1))}
    short |= numbered
    padded = {name: np.pad(x, ((0, 0), (0, 16))) for name, x in short.items()}
    found = []
    for data in (short, padded):
        run = run_on_enough_devices(Program(config.build, optax.sgd(0.1), Plan("expert=4", experts=Capacity(4.0))))
        metrics = run.step(run.init(0), run.put(data))[1]
        assert float(metrics["weight/routed"]) == 384.0 and float(metrics["routed"]) == 1.0
        found.append(run_loss_and_grads(run, data))
    (loss, grads), (padded_loss, padded_grads) = found
    assert loss == pytest.approx(padded_loss, rel=1e-6)
    for path, g in grads.items():
        assert np.abs(g - padded_grads[path]).max() <= 1e-5 * np.abs(g).max() + 1e-7, path


def test_pairs_beyond_a_capacity_are_dropped_and_counted():
    """Otherwise a person cannot see that a quarter of what the router chose was lost."""
    config = replace(CONFIG, num_layers=1)
    run = run_on_enough_devices(Program(config.build, optax.sgd(0.1), Plan("expert=2", experts=Capacity(1.0))))
    metrics = {n: float(x) for n, x in run.step(run.init(0), run.put(batch("one token")))[1].items()}
    # All tokens want the same two of eight experts, of which each takes an eighth.
    assert metrics["routed"] == pytest.approx(0.25) and metrics["dropped"] == pytest.approx(0.75)


def test_pairs_that_overflow_a_round_are_counted():
    """Otherwise a router that has collapsed onto one device is seen in nothing but time."""
    run = run_on_enough_devices(Program(CONFIG.build, optax.adam(0.1), Plan("expert=8")))
    state, metrics = run.step(run.init(0), run.put(batch("one token")))
    assert float(metrics["routed"]) == 1.0 and float(metrics["overflow"]) > 0.2
    # What Adam remembers of experts without tokens: two are chosen in each of two layers, by one token in all rows.
    (moments,) = (x for path, x in state.opt_state[0].nu.items() if path == "blocks.experts.down")
    assert (np.asarray(moments).reshape(2, 8, -1).max(axis=-1) > 0).sum(axis=-1).tolist() == [2, 2]


def test_clipping_uses_one_norm_for_all_groups_of_experts():
    """Otherwise dense weights are clipped differently by device, and copies drift apart."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1))
    run = run_on_enough_devices(Program(COUNTED.build, optimizer, Plan("data=2,expert=4")))
    state = run.init(0)
    for step in range(20):
        data = make_batch("uneven", ROWS, CONFIG.vocab_size, LENGTH, seed=step)
        state, metrics = run.step(state, run.put(data | {"tokens": np.where(data["tokens"] < 40, 5, data["tokens"])}))
    assert strays((state, metrics)) == [] and int(state.skipped) == 0
