"""ZeRO within a node: shards in each node, replicas across nodes. Eight devices stand for two nodes of four."""

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.estimate.compile import report
from jaxpar.testing import compare, loss_and_grads, one_device, run_loss_and_grads
from models.llama import LlamaConfig

CONFIG = LlamaConfig(61, 2, 36, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)
PLANS = [
    jaxpar.Plan("data=8", zero=jaxpar.Zero(1, within_node=True), microbatches=2),
    jaxpar.Plan("data=8", zero=jaxpar.Zero(3, within_node=True), microbatches=2),
    jaxpar.Plan("data=4,tensor=2", zero=jaxpar.Zero(2, within_node=True)),
    jaxpar.Plan("data=4,tensor=2", zero=jaxpar.Zero(3, within_node=True)),
]


def program(plan: jaxpar.Plan) -> jaxpar.Program:
    return jaxpar.Program(CONFIG.build, optax.sgd(0.1), plan)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 61, (2, 16, 16)).astype(np.int32)
    weights = (rng.random((16, 16)) < 0.4).astype(np.float32)
    return {"tokens": ids[0], "targets": ids[1], "weights": weights}


@pytest.fixture(scope="module")
def expected(batch):
    return loss_and_grads(one_device(program(PLANS[0])), batch)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_shards_within_a_node_equal_one_device(plan, batch, expected):
    """Otherwise a gradient is summed over one node and not over the other, or twice."""
    run = program(plan).on(jax.devices(), devices_per_node=4)
    assert run.mesh.shape["replica"] == 2
    assert compare(*run_loss_and_grads(run, batch), *expected) == []


def test_only_shards_of_gradients_cross_nodes_and_only_once_a_step():
    """Otherwise the slow links between nodes carry what the fast ones within them should."""
    run = program(PLANS[1]).on(jax.devices(), devices_per_node=4)
    step = report(run.lower(jaxpar.token_shapes(16, 16)), run.mesh)
    shards = sum(p.info.dtype.itemsize * int(np.prod(p.storage_shape)) // 4 for p in run.placements.values())
    across = [c for c in step.collectives if "replica" in c.axes and c.bytes >= 64]
    assert {(c.axes, c.kind, c.loop_depth) for c in across} == {(("replica",), "all-reduce", 0)}
    assert sum(c.bytes for c in across) == shards


def test_one_node_is_plain_zero():
    """Otherwise a machine of one node pays for what it has not got."""
    assert "replica" not in program(PLANS[1]).on(jax.devices()).mesh.shape


def test_groups_that_nodes_cannot_hold_are_refused():
    """Otherwise shards of one parameter would lie in two nodes, unnoticed."""
    with pytest.raises(jaxpar.PlanError, match="nodes of 3 devices"):
        program(PLANS[2]).on(jax.devices(), devices_per_node=3)
    with pytest.raises(jaxpar.PlanError, match="shards nothing with zero=0"):
        jaxpar.Plan("data=8", zero=jaxpar.Zero(0, within_node=True))
