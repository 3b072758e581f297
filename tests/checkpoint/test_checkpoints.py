"""A checkpoint restores on any mesh, is whole or absent, and says what is wrong with it."""

import gc
import resource
import shutil
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.checkpoint.leaves import by_name
from models.llama import LlamaConfig

# When one of many writes or reads fails, Orbax closes its event loop while the others still report to it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Sizes that 8 does not divide are stored padded under ZeRO.
CONFIG = LlamaConfig(vocab_size=61, num_layers=2, embed_dim=36, num_heads=8, num_kv_heads=4, head_dim=2, mlp_dim=16)
DATA = {"rows_consumed": 32, "fingerprint": "abc"}


def on(mesh, zero=0, config=CONFIG):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    plan = jaxpar.Plan(mesh=mesh, zero=zero)
    return jaxpar.Program(config.build, optimizer, plan).on(jax.devices()[: plan.shape.fixed_size()])


def batch(rows=8):
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, 61, (rows, 12), dtype=np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "weights": np.ones((rows, 12), np.float32)}


def logical(run, state):
    leaves = by_name(run.to_logical(state))
    leaves["key"] = jax.random.key_data(leaves["key"])
    return {name: np.array(leaf) for name, leaf in leaves.items()}


def assert_bitwise_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert found[name].dtype == leaf.dtype, name
        assert found[name].tobytes() == leaf.tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By stage of ZeRO, each once."""
    return cache(lambda zero: trained_and_saved(zero, tmp_path_factory))


def trained_and_saved(zero, tmp_path_factory):
    """For two steps and on data=8; donated to a third step before the save can be complete."""
    run = on("data=8", zero)
    state, _ = run.step(run.init(seed=3), run.put(batch()))
    state, _ = run.step(state, run.put(batch()))
    expected = logical(run, state)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints")
    checkpoints.save(run, state, DATA)
    _, metrics = run.step(state, run.put(batch()))
    checkpoints.close()
    return checkpoints, expected, float(metrics["loss"])


MESHES = [
    (0, "data=8", 3),
    (0, "tensor=8", 0),
    (0, "data=4,tensor=2", 1),
    (0, "data=2,tensor=2", 0),
    (3, "data=8", 3),
    (3, "tensor=4", 0),
    (3, "data=1", 0),
]


@pytest.mark.parametrize(("saved_with", "mesh", "zero"), MESHES)
def test_any_mesh_restores_every_bit_and_takes_the_same_next_step(saved, saved_with, mesh, zero):
    """Otherwise a run could not go on when the cluster changes, or would go on with other numbers."""
    checkpoints, expected, next_loss = saved(saved_with)
    run = on(mesh, zero)
    restored = checkpoints.restore(run)
    assert_bitwise_equal(logical(run, restored.state), expected)
    assert restored.data == DATA
    shardings = jax.tree.map(lambda x: x.sharding, restored.state)
    assert shardings == jax.tree.map(lambda x: x.sharding, run.abstract_state)
    _, metrics = run.step(restored.state, run.put(batch()))
    assert abs(float(metrics["loss"]) - next_loss) < 1e-6 * next_loss


@pytest.fixture(scope="module")
def small():
    run = on("data=1")
    return run, run.init()


def at(state, step):
    return replace(state, step=jax.numpy.int32(step))


def save(checkpoints, small, *steps):
    for step in steps:
        checkpoints.save(small[0], at(small[1], step), {})
    checkpoints.wait()


def test_leaves_that_do_not_fit_are_named_one_by_one(saved):
    """Otherwise one would guess which of a thousand leaves is the wrong one, or train on with a part at random."""
    checkpoints = saved(0)[0]
    with pytest.raises(jaxpar.CheckpointError) as error:
        checkpoints.restore(on("data=1", config=replace(CONFIG, mlp_dim=24, tie_embeddings=True)))
    message = str(error.value)
    assert "params/blocks.mlp.up.kernel: needed float32[2, 36, 24], found float32[2, 36, 16]" in message
    assert "params/unembedding: float32[61, 36] in the checkpoint, not in the model" in message


def test_a_key_keeps_its_generator_whatever_the_default_of_jax(saved):
    """Otherwise dropout would go on with another stream of masks."""
    with jax.default_prng_impl("rbg"):
        key = saved(0)[0].restore(on("data=1")).state.key
    assert str(key.dtype) == "key<fry>"


def test_only_the_last_few_checkpoints_stay(tmp_path, small):
    """Otherwise a long run would fill its disk."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, small, 1, 2, 3)
    assert checkpoints.steps() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_half_written_or_half_deleted_checkpoint_is_never_the_latest(tmp_path, small):
    """Otherwise a run killed while it saves could never be resumed."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, small, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "7.orbax-checkpoint-tmp-1")
    shutil.copytree(tmp_path / "1", tmp_path / "6.deleted")
    (tmp_path / "9").mkdir()
    assert checkpoints.latest() == 1
    save(checkpoints, small, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "9"]


def test_a_full_disk_fails_the_next_call_and_leaves_earlier_checkpoints_usable(tmp_path, small):
    """Otherwise training would end well while nothing was saved."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, small, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(
            jaxpar.CheckpointError, match=r"step 2 could not be written.*Complete checkpoints here: 1\."
        ):
            checkpoints.save(small[0], at(small[1], 2), {})
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.close()
    assert int(checkpoints.restore(small[0]).state.step) == 1
    save(checkpoints, small, 3)
    assert checkpoints.steps() == [1, 3]


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path, small):
    """Otherwise the user would read a stack of storage code."""
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxpar.CheckpointError, match=r"step 1 could not be written to .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(small[0], at(small[1], 1), {})


def test_damage_and_other_formats_are_named(tmp_path, small):
    """Otherwise a truncated file would look like a bug of the program."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, small, 1, 2)
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(jaxpar.CheckpointError, match=r"2 cannot be read.*Others here: 1;"):
        checkpoints.restore(small[0])
    gc.collect()  # Orbax leaves reads behind that failed as well: they end here, and not in a later test.
    metadata = tmp_path / "1" / "_CHECKPOINT_METADATA"
    metadata.write_text(metadata.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(
        jaxpar.CheckpointError, match="has the checkpoint format 99, this version of jaxpar reads format 1"
    ):
        checkpoints.restore(small[0], step=1)


def test_asking_for_what_is_not_there_says_what_is(tmp_path, small):
    """Otherwise a wrong folder would look like an empty model."""
    with pytest.raises(jaxpar.CheckpointError, match="has no checkpoint; it holds nothing"):
        Checkpoints(tmp_path / "none").restore(small[0])
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, small, 4)
    with pytest.raises(jaxpar.CheckpointError, match="no checkpoint of step 5; it holds 4"):
        checkpoints.restore(small[0], step=5)
