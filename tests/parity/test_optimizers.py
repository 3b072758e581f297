"""Every optimizer and schedule makes of the same gradients, on every mesh, the parameters of one device."""

from dataclasses import replace
from functools import lru_cache

import jax
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import Plan, Program, Run
from jaxpar.structure import inspect_model
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.groups import ParameterGroup
from jaxpar.training.optimizer import OptimizerConfig
from models.llama import LlamaConfig
from tests.training.updates import assert_equal, drawn, trajectory

# A vocabulary that is stored padded, kv heads that tensor=4 replicates, biases and scales of every rank, and layers
# that two stages store padded.
CONFIG = LlamaConfig(61, 3, 16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32, attention_bias=True, qk_norm=True)
PARAMS = inspect_model(CONFIG.build).params
STEPS = 10
SHORT = OptimizerConfig(learning_rate=0.1, warmup_steps=2, min_dim_to_factor=4)
GROUPS = (
    ParameterGroup("embedding", learning_rate=0.5, weight_decay=0.0),
    ParameterGroup("*.bias", weight_decay=1.0),
    ParameterGroup("blocks.attention.q.*", frozen=True),
)
OPTIMIZERS = {
    "adamw cosine": SHORT,
    "adamw groups average": replace(SHORT, groups=GROUPS, average=0.9),
    "lion linear": replace(SHORT, name="lion", schedule="linear"),
    "adafactor wsd": replace(SHORT, name="adafactor", schedule="wsd"),
    "sgd constant": replace(SHORT, name="sgd", schedule="constant"),
    "muon wsd": replace(SHORT, name="muon", schedule="wsd"),
    "schedule_free groups": replace(SHORT, name="schedule_free", schedule="constant", groups=GROUPS),
}
PLANS = {"data=4,tensor=2": 3, "data=2,tensor=4": 1, "data=2,pipe=2,tensor=2": 3}


@lru_cache
def updated(name: str, mesh: str, zero: int):
    optimizer = OPTIMIZERS[name].build(PARAMS, STEPS)
    run = run_on_enough_devices(Program(CONFIG.build, optimizer, Plan(mesh, zero=zero)))
    return trajectory(run, drawn(PARAMS, 0), [drawn(PARAMS, 1 + step) for step in range(STEPS)])


@pytest.mark.parametrize("mesh", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_updates_equal_those_of_one_device(name, mesh):
    """Otherwise an optimizer sees its shard alone: its norms, its factors or its matrices are those of a part."""
    for found, want in zip(updated(name, mesh, PLANS[mesh]), updated(name, "data=1", 0), strict=True):
        assert_equal(found, want, 1e-9)


@lru_cache
def stepping(name: str, plan: Plan) -> Run:
    """One device's step is compiled once for all meshes."""
    return run_on_enough_devices(Program(CONFIG.build, replace(SHORT, name=name).build(PARAMS, STEPS), plan))


@pytest.mark.parametrize(("mesh", "microbatches"), [("data=2,tensor=2", 1), ("pipe=2,tensor=2", 4)])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_ten_whole_steps_equal_one_device_from_the_same_state(name, mesh, microbatches):
    """Otherwise what a step does between gradients and optimizer, and after it, depends on the mesh.

    Held are losses and all that is linear in gradients: parameters under SGD, first moments under Adam. Adam divides
    by the size of a gradient, so that rounding decides the sign of an update whose gradient is zero but for rounding.
    """
    one, many = stepping(name, Plan("data=1")), stepping(name, Plan(mesh, zero=3, microbatches=microbatches))
    state = many.init(0)
    for step in range(STEPS):
        batch = make_batch("uneven", 8, CONFIG.vocab_size, seed=step)
        want, expected = one.step(one.from_logical(on(one, many.to_logical(state))), one.put(batch))
        state, metrics = many.step(state, many.put(batch))
        for metric, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5)):
            assert float(metrics[metric]) == pytest.approx(float(expected[metric]), rel=tolerance), (metric, step)
        found = [linear(name, run.to_logical(s)) for run, s in ((many, state), (one, want))]
        assert_equal(*found, 1e-5)


def on(run, logical):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), logical, run.abstract_logical_state)


def linear(name, state):
    if name == "sgd":
        return jax.device_get(state.params)
    (adam,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s)]
    return jax.device_get(adam.mu)


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)
