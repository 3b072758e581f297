"""Mixtures of experts equal one device, wherever their experts are; under SGD, so that a factor would show."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import Capacity, Plan, PlanError, Program, Run
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from models.moe import MoEConfig

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
def run_of(plan: Plan, config: MoEConfig = CONFIG) -> Run:
    """Compiled once for all tests."""
    return run_on_enough_devices(program(plan, config))


@lru_cache
def loss_and_grads(plan: Plan, kind: str, config: MoEConfig = CONFIG):
    return run_loss_and_grads(run_of(plan, config), batch(kind))


def reference(config: MoEConfig, kind: str):
    return loss_and_grads(Plan("data=1"), kind, config)


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
    for kind in kinds:
        differences = compare(*loss_and_grads(plan, kind), *reference(CONFIG, kind))
        assert not differences, f"{kind}:\n" + "\n".join(map(str, differences))


ROUTERS = {
    "sigmoid with groups, a bias and jitter": {
        "router": "sigmoid",
        "expert_groups": 4,
        "groups_per_token": 2,
        "experts_per_token": 3,
        "bias_rate": 0.01,
        "router_jitter": 0.1,
        "num_layers": 4,
        "num_dense_layers": 2,
        "num_shared_experts": 0,
    },
    "expert choice": {"router": "expert_choice"},
}


@pytest.mark.parametrize(
    ("router", "plan"),
    [
        ("sigmoid with groups, a bias and jitter", Plan("expert=4,pipe=2", microbatches=2, remat="dots")),
        ("expert choice", Plan("expert=2,seq=2,tensor=2")),
    ],
)
def test_other_routers_give_the_numbers_of_one_device(router, plan):
    """Otherwise what one router needs beyond another, such as a whole row, or noise, would depend on the mesh.

    The gradient of a bias is how often its expert was chosen.
    """
    config = replace(CONFIG, **ROUTERS[router])
    found = loss_and_grads(plan, "uneven", config)
    assert not compare(*found, *reference(config, "uneven"))
    if config.bias_rate:
        chosen = found[1]["blocks.experts.router.bias"].sum(axis=-1)
        assert chosen.tolist() == [ROWS * LENGTH * config.experts_per_token] * 2


def test_terms_of_the_router_do_not_grow_with_the_mesh():
    """Otherwise the pull to balance would change with the number of devices or microbatches, and no loss shows it."""
    quiet = {**batch("packed"), "weights": np.zeros((ROWS, LENGTH), np.float32)}
    plan = Plan("expert=2,seq=2,tensor=2", microbatches=4)
    loss, grads = run_loss_and_grads(run_on_enough_devices(program(plan)), quiet)
    alone = run_loss_and_grads(run_of(Plan("data=1")), quiet)
    assert not compare(loss, grads, *alone)
    assert np.abs(grads["blocks.experts.router.kernel"]).max() > 1e-3 > np.abs(grads["unembedding"]).max()


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    """Otherwise it would be what lay in memory before, and Adam would remember it."""
    _, grads = loss_and_grads(Plan("expert=8"), "one token")
    by_expert = np.abs(grads["blocks.experts.down"]).max(axis=(2, 3))
    assert ((by_expert > 0).sum(axis=1) <= 3).all() and np.isfinite(by_expert).all()


@pytest.mark.parametrize("experts", [6, 2])
def test_experts_that_do_not_divide_are_refused_with_both_numbers(experts):
    """Otherwise the error would come from a reshape, and name neither."""
    config = replace(CONFIG, num_experts=experts)
    with pytest.raises(PlanError, match=rf"'experts'\) of size {experts} does not divide over expert=4"):
        program(Plan("expert=4"), config).validate(devices=4)
