"""A state that was trained in a pipeline is the same state in any other, and on none."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.parity_table import make_batch
from jaxpar import Plan, Program
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.checkpoint.leaves import by_name
from jaxpar.testing import run_on_enough_devices
from models.llama import LlamaConfig

# Layers that divide neither over two stages nor over four parts; a vocabulary that divides over nothing.
CONFIG = LlamaConfig(61, 7, 16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32)
LENGTH = 8
PIPELINES = {
    "uneven": {},
    "stage_layers": {"stage_layers": (2, 5)},
    "interleaved": {"pipeline": "interleaved", "virtual_stages": 2},
    "zero_bubble_v": {"pipeline": "zero_bubble_v"},
}


def on(mesh, zero=0, **options):
    plan = Plan(mesh, zero=zero, microbatches=2 if "pipe" in mesh else 1, **options)
    return run_on_enough_devices(Program(CONFIG.build, optax.adamw(1e-2, weight_decay=0.1), plan))


def bits(run, state):
    """By name, the bytes of every leaf of the logical state."""
    logical = run.to_logical(state)
    leaves = by_name(replace(logical, key=jax.random.key_data(logical.key)))
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()}


def batch(seed=0):
    return make_batch("uneven", 8, CONFIG.vocab_size, LENGTH, seed)


@pytest.fixture(scope="module", params=PIPELINES.values(), ids=PIPELINES)
def trained(request):
    """Two steps of a pipeline."""
    run = on("pipe=2", **request.param)
    state = run.init(0)
    for seed in range(2):
        state, _ = run.step(state, run.put(batch(seed)))
    return run, state


def padding(run, state):
    """By name, what is stored in places without a layer: parameters, and what the optimizer keeps for them."""
    placements = {id(leaf): run.placements[path] for path, leaf in state.params.items()}
    placements |= {
        id(leaf): p for leaf, p in zip(jax.tree.leaves(state.opt_state), run.layout.opt_placements, strict=True)
    }
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
    stacked = [(jax.tree_util.keystr(path), x, placements[id(x)]) for path, x in leaves]
    return {
        name: np.asarray(x)[p.layers.stored_depths < 0]
        for name, x, p in stacked
        if p is not None and p.layers is not None
    }


def test_places_without_a_layer_stay_zero(trained):
    """Otherwise what is no layer is decayed, or counts in a norm."""
    found = padding(*trained)
    assert len(found) == 3 * sum(info.stack is not None for info in trained[0].structure.params.values())
    assert all(x.size > 0 and not x.any() for x in found.values())


def test_stored_again_it_is_bitwise_the_same(trained):
    """Otherwise saving changes what is trained."""
    run, state = trained
    again = run.from_logical(run.to_logical(state))
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(again.params), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.sharding == y.sharding


def test_a_checkpoint_of_a_pipeline_restores_without_one_and_back(trained, tmp_path):
    """Otherwise layers come back in another order, or padding comes back as layers."""
    run, state = trained
    want, data = bits(run, state), {"rows_consumed": 16}
    for folder, source, target in (("first", run, on("data=2", 3)), ("second", on("data=2", 3), run)):
        checkpoints = Checkpoints(tmp_path / folder)
        checkpoints.save(source, state, data)
        checkpoints.close()
        state = checkpoints.restore(target).state
        assert bits(target, state) == want, folder


def test_the_model_of_a_pipeline_has_its_layers_in_depth_order(trained):
    """Otherwise what is exported is another model: here it must give the loss that the pipeline gives."""
    run, state = trained
    found = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(run.model(state), nnx.Param))}
    for path, x in run.to_logical(state).params.items():
        assert np.array_equal(found[path.replace("blocks.", "blocks.layers.")][...], x), path
    alone = on("data=1")
    same = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), run.to_logical(state), alone.abstract_logical_state)
    want = alone.evaluate(alone.from_logical(same), [batch()])
    assert run.evaluate(state, [batch()]) == pytest.approx(want, rel=1e-6)
