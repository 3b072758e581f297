"""Mixtures of experts equal one device, wherever their experts are; under SGD, so that a factor would show."""

from dataclasses import replace
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import Capacity, Plan, PlanError, Program
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from models.moe import MoEConfig, choose, scores

CONFIG = MoEConfig(
    vocab_size=61,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    num_experts=8,
    experts_per_token=2,
    moe_mlp_dim=12,
    num_shared_experts=1,
    balance_coef=0.1,
    router_z_coef=0.01,
)
ROWS, LENGTH = 8, 8


def batch(kind: str) -> dict[str, np.ndarray]:
    made = make_batch("packed" if kind == "packed" else "uneven", ROWS, CONFIG.vocab_size, LENGTH)
    return {**made, "tokens": np.full_like(made["tokens"], 5)} if kind == "one token" else made


def program(plan: Plan, config: MoEConfig = CONFIG) -> Program:
    return Program(config.build, optax.sgd(0.1), plan)


@lru_cache
def reference(config: MoEConfig, kind: str):
    return run_loss_and_grads(run_on_enough_devices(program(Plan("data=1"), config)), batch(kind))


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        (Plan("expert=8"), ["uneven", "one token", "packed"]),
        (Plan("data=2,expert=2,tensor=2", zero=3, microbatches=2), ["packed"]),
        (Plan("expert=2,pipe=2,seq=2", zero=1, microbatches=4, pipeline="zero_bubble"), ["packed"]),
        (Plan("expert=4", experts=Capacity(8.0), remat="full"), ["uneven"]),
    ],
    ids=str,
)
def test_experts_on_any_mesh_give_the_numbers_of_one_device(plan, kinds):
    """Otherwise an expert's gradient is counted once per device, pairs are lost, or come back to another token.

    "one token": all tokens choose the same two experts, six get none, and one device gets all pairs in several rounds.
    """
    run = run_on_enough_devices(program(plan))
    for kind in kinds:
        differences = compare(*run_loss_and_grads(run, batch(kind)), *reference(CONFIG, kind))
        assert not differences, f"{kind}:\n" + "\n".join(map(str, differences))


def test_another_router_beside_dense_layers_gives_the_numbers_of_one_device():
    """Otherwise what one router needs beyond another, such as sums over a row, would depend on the mesh."""
    config = replace(CONFIG, router="sigmoid", experts_per_token=3, num_dense_layers=1, num_shared_experts=0)
    found = run_loss_and_grads(run_on_enough_devices(program(Plan("expert=4,data=2"), config)), batch("uneven"))
    assert not compare(*found, *reference(config, "uneven"))


def test_routers_weigh_the_same_experts_as_their_papers_do():
    """Otherwise weights imported from one of these models would mean another one."""
    logits = jnp.asarray([[[3.0, 1.0, 2.0, 0.0]]])
    exp, sig = np.exp([3.0, 2.0]), 1 / (1 + np.exp([-3.0, -2.0]))
    all_exp = np.exp([3.0, 1.0, 2.0, 0.0]).sum()
    for router, normalize, expected in (
        ("topk_softmax", False, exp / exp.sum()),
        ("softmax", False, exp / all_exp),
        ("softmax", True, exp / exp.sum()),
        ("sigmoid", False, sig),
        ("sigmoid", True, sig / sig.sum()),
    ):
        config = replace(CONFIG, router=router, normalize_weights=normalize)
        expert, weight = choose(logits, scores(logits, router), config)
        assert expert[0, 0].tolist() == [0, 2]
        assert np.allclose(weight[0, 0], expected, atol=1e-6), router


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    """Otherwise it would be what lay in memory before, and Adam would remember it."""
    _, grads = run_loss_and_grads(run_on_enough_devices(program(Plan("expert=8"))), batch("one token"))
    by_expert = np.abs(grads["blocks.experts.down"]).max(axis=(2, 3))
    assert ((by_expert > 0).sum(axis=1) <= 3).all() and np.isfinite(by_expert).all()


@pytest.mark.parametrize("experts", [6, 2])
def test_experts_that_do_not_divide_are_refused_with_both_numbers(experts):
    """Otherwise the error would come from a reshape, and name neither."""
    config = replace(CONFIG, num_experts=experts)
    with pytest.raises(PlanError, match=rf"'experts'\) of size {experts} does not divide over expert=4"):
        program(Plan("expert=4"), config).validate(devices=4)
