"""Known fault of compilers and devices: replicas that differ while the loss looks well (openxla/xla 40034)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from experiments.parity_table import make_batch
from jaxpar.errors import TrainingError
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.callbacks import Callback
from jaxpar.training.guard import Guard, Replicas, fingerprint
from jaxpar.training.trainer import train
from models.llama import LlamaConfig
from tests.training.tiny import make_data, make_run

LEAF = "blocks.mlp_norm.scale"  # replicated over data and tensor


def with_flip(state, path, device):
    """The state with the lowest bit of one value of a parameter's copy on one device turned round."""
    array = state.params[path]
    shards = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device.id == device:
            values.view(np.uint32).flat[3] ^= 1
        shards.append(jax.device_put(values, shard.device))
    flipped = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return replace(state, params=state.params | {path: flipped})


class Flip(Callback):
    def on_step(self, loop):
        if loop.step == 3:
            loop.state = with_flip(loop.state, LEAF, 5)


@pytest.fixture(scope="module")
def run():
    return make_run("data=4,tensor=2", zero=0)


def test_one_bit_on_one_device_is_found_with_its_leaf_and_its_device(run):
    """Otherwise a run would go on for weeks on replicas that are no replicas."""
    with pytest.raises(TrainingError) as error:
        train(run, run.init(), make_data(), 20, [Flip(), Guard(every=4)])
    message = str(error.value)
    assert "are not, at step 4" in message
    assert f"params/{LEAF}: device 5 (process 0, cpu) holds other bits than devices 0, 1, 2, 3, 4, 6, 7" in message
    assert len([line for line in message.splitlines() if "device 5" in line]) == 1


def test_a_copy_of_a_tensor_shard_is_compared_with_the_copies_of_that_shard(run):
    """Otherwise shards that differ because they hold different columns would be alarms, or the leaf be left out."""
    replicas, state, leaf = Replicas(run), run.init(), "blocks.mlp.up.kernel"
    assert replicas.axes[f"params/{leaf}"] == ("data",)
    assert replicas.differences(state) == []
    assert replicas.differences(with_flip(state, leaf, 5)) == [
        f"params/{leaf}: device 5 (process 0, cpu) holds other bits than devices 1, 3, 7"
    ]


def test_of_two_copies_none_is_called_the_wrong_one():
    """Otherwise a good device would be taken out of the machine."""
    run = make_run("data=2")
    lines = Replicas(run).differences(with_flip(run.init(), LEAF, 1))
    assert lines == [f"params/{LEAF}: its copies on devices 0, 1 differ, and no value is in the majority"]


class Costs(Callback):
    checks = 0

    def on_record(self, loop, step, record):
        self.checks += "guard_seconds" in record


@pytest.mark.parametrize("zero", [0, 3])
def test_fifty_clean_steps_raise_no_alarm(zero):
    """Otherwise the guard would be turned off, and rightly."""
    run, costs = make_run("data=4,tensor=2", zero=zero), Costs()
    train(run, run.init(), make_data(), 50, [Guard(every=1), costs])
    assert costs.checks == 50


def test_in_a_pipeline_copies_lie_over_the_axes_that_do_not_hold_stages():
    """Otherwise the stages' own layers would be alarms, or the norm that all stages keep would be left out."""
    config = LlamaConfig(31, 3, 16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
    plan = jaxpar.Plan("data=2,pipe=2,tensor=2", microbatches=2)
    run = run_on_enough_devices(jaxpar.Program(config.build, optax.adamw(1e-2), plan))
    replicas, state = Replicas(run), run.init()
    assert replicas.axes[f"params/{LEAF}"] == ("data", "tensor")
    assert replicas.axes["params/norm.scale"] == ("data", "pipe", "tensor")
    assert replicas.axes["params/embedding"] == ("data",)
    for _ in range(2):
        state, _ = run.step(state, run.put(make_batch("uneven", 8, 31, 8)))
        assert replicas.differences(state) == []
    found = replicas.differences(with_flip(state, LEAF, 6))
    assert found == [f"params/{LEAF}: device 6 (process 0, cpu) holds other bits than devices 4, 5, 7"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_fingerprint_tells_values_that_change_places(dtype):
    """Otherwise rows that came in another order would pass, or a dtype could not be guarded at all."""
    x = (jnp.arange(12) % 5).reshape(3, 4).astype(dtype)
    other = np.array(x)
    other.flat[0] = 1
    assert fingerprint(x) == fingerprint(jnp.array(x))
    assert fingerprint(x) not in (fingerprint(x[::-1]), fingerprint(jnp.asarray(other)))


def test_leaves_that_no_two_devices_share_are_not_compared():
    """Otherwise ZeRO's shards would be alarms."""
    replicas = Replicas(make_run("data=2", zero=3))
    assert "step" in replicas.axes and "key" in replicas.axes
    assert not [name for name in replicas.axes if name.endswith("mlp.up.kernel")]
