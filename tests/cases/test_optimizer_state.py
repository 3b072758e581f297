"""Optimizer state of wrapped and factored transformations lies with its parameters; one clock for all schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import Plan, PlanError, Program
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.collectives import live_spec
from jaxpar.structure import inspect_model
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.per_layer import per_layer
from models.llama import LlamaConfig
from tests.cases.models import given_losses, losses_and_weights
from tests.training.updates import assert_equal, drawn, trajectory

CONFIG = LlamaConfig(61, 2, 16, num_heads=4, num_kv_heads=4, head_dim=4, mlp_dim=32)
PARAMS = inspect_model(CONFIG.build).params
MESH = Plan("data=2,tensor=4", zero=1)


def on(plan, optimizer):
    return run_on_enough_devices(Program(CONFIG.build, optimizer, plan))


def label(path: str) -> str:
    if path.endswith("scale"):
        return "norms"
    return "tables" if path.endswith("embedding") else "rest"


def nested() -> optax.GradientTransformation:
    adafactor = per_layer(optax.adafactor(0.1, min_dim_size_to_factor=4), PARAMS)
    parts = {"tables": optax.adam(0.1), "rest": adafactor, "norms": optax.set_to_zero()}
    inner = optax.partition(parts, {path: label(path) for path in PARAMS})
    return optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(inner, 4).gradient_transformation())


def test_state_inside_partition_multisteps_and_chain_is_split_like_its_parameters():
    """Otherwise wrapping an optimizer replicates its moments on every device, in silence."""
    run = on(MESH, nested())
    state = run.init(0)
    leaves = dict(named(state.opt_state))
    whole = sum(leaf.nbytes for leaf in leaves.values())
    here = {name: leaf.addressable_shards[0].data.nbytes for name, leaf in leaves.items()}
    eighth = [name for name, leaf in leaves.items() if here[name] * 8 == leaf.nbytes]
    kernels = [path for path in PARAMS if label(path) != "norms"]
    assert {name for name in eighth if "acc_grads" in name} == {f"1/acc_grads/{path}" for path in kernels}
    assert {name for name in eighth if "/mu/" in name} == {
        f"1/inner_opt_state/inner_states/tables/inner_state/0/mu/{path}" for path in kernels if label(path) == "tables"
    }
    others = sum(size for name, size in here.items() if name not in eighth)
    assert sum(here.values()) <= whole / 8 + others and others < whole / 16


def named(tree):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def test_a_factor_lies_with_the_dim_that_it_kept():
    """Otherwise factored moments are whole on every device, or their sharding is illegal."""
    run = on(MESH, per_layer(optax.adafactor(0.1, min_dim_size_to_factor=4), PARAMS))
    specs = {name: where.spec for name, where in named(run.layout.storage_shardings().opt_state)}
    zero = ("data", "seq", "expert")
    for factor, want in (("v_row", zero), ("v_col", "tensor")):
        spec = specs[f"blocks/0/{factor}/blocks.mlp.up.kernel"]
        assert run.layout.placements["blocks.mlp.up.kernel"].info.dims == (16, 32)
        assert spec == live(run, None, "pipe", None, want), (factor, spec)


def live(run, *dims):
    return live_spec(jax.P(*dims), run.mesh)


def test_eight_steps_of_a_nested_optimizer_equal_one_device():
    """Otherwise accumulation, partition or factors depend on the mesh."""
    gradients = [drawn(PARAMS, 1 + step) for step in range(8)]
    many, one = (trajectory(on(plan, nested()), drawn(PARAMS, 0), gradients) for plan in (MESH, Plan("data=1")))
    for step, (found, want) in enumerate(zip(many, one, strict=True)):
        assert_equal(found, want, 1e-9)
        moved = not np.array_equal(want["embedding"], drawn(PARAMS, 0)["embedding"])
        assert moved == (step >= 3)


def test_hyperparameters_in_the_state_and_masked_transformations_find_their_place():
    """Otherwise a rate kept in the state is an error, or what a mask leaves out is."""
    masked = optax.masked(optax.ema(0.9), {path: label(path) == "rest" for path in PARAMS})
    rates = optax.inject_hyperparams(optax.lion)(learning_rate=lambda count: 0.1 / (1 + count))
    run = on(MESH, optax.chain(masked, rates))
    shapes = dict(named(run.abstract_state.opt_state))
    assert shapes["1/hyperparams/learning_rate"].sharding.is_fully_replicated
    for name, leaf in shapes.items():
        path = name.rpartition("/")[2]
        if path in PARAMS:
            assert leaf.sharding.spec == run.layout.update_shardings()[path].spec, name


@pytest.mark.parametrize("where", ["beside", "below"])
def test_large_state_that_follows_no_parameter_is_refused_by_name(where):
    """Otherwise it would be whole on every device, and nobody would know."""

    def init(params):
        large = jnp.zeros((40, 41))
        return {"sketch": large} if where == "beside" else {"sketch": {path: large for path in params}}

    optimizer = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    name = "sketch" if where == "beside" else r"sketch/blocks\.mlp\.up\.kernel"
    with pytest.raises(PlanError, match=rf"optimizer state {name}: float32\[40, 41\] follows no parameter"):
        on(MESH, optimizer).init(0)


SCHEDULES = {
    "learning rate": (optax.sgd(lambda update: update / 4), 1.0, [1.0, 0.75, 0.25, -0.5]),
    "weight decay": (
        optax.chain(
            optax.inject_hyperparams(optax.add_decayed_weights)(weight_decay=lambda update: update / 4),
            optax.scale(-1.0),
        ),
        0.0,
        [1.0, 0.75, 0.375, 0.09375],
    ),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_schedules_count_updates_across_microbatches_skipped_steps_and_a_resume(what, tmp_path):
    """Otherwise four microbatches count as four updates, a resume doubles or resets the position, or the decay runs
    by another clock than the rate."""
    optimizer, loss, expected = SCHEDULES[what]

    def start(microbatches):
        program = given_losses("data=2", microbatches=microbatches)
        run = run_on_enough_devices(Program(program.build, optimizer, program.plan, program.batch_axes))
        return run, lambda value: run.put(losses_and_weights(np.full((16, 1), value), 1.0))

    run, batch = start(4)
    state, found = run.init(0), []
    for value in (loss, np.nan, loss):
        state, metrics = run.step(state, batch(value))
        found += [] if metrics["skipped"] else [float(state.params["blocks.scale"][0, 0, 0])]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(run, state, {})
    checkpoints.close()
    run, batch = start(8)
    state = checkpoints.restore(run).state
    for _ in range(2):
        state, _ = run.step(state, batch(loss))
        found.append(float(state.params["blocks.scale"][0, 0, 0]))
    assert found == pytest.approx(expected)
