"""Replicated values stay bitwise equal across devices."""

from collections import defaultdict
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program
from jaxpar.testing import run_on_enough_devices


def strays(tree) -> list[str]:
    """The leaves of which two devices that hold the same part hold different bits."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        copies = defaultdict(set)
        for shard in leaf.addressable_shards:
            copies[str(shard.index)].add(np.asarray(shard.data).tobytes())
        if any(len(different) > 1 for different in copies.values()):
            found.append(jax.tree_util.keystr(path))
    return found


@pytest.mark.parametrize(
    ("mesh", "zero"), [("data=8", 0), ("data=4,tensor=2", 0), ("data=4,tensor=2", 1), ("tensor=8", 0)]
)
def test_copies_are_bitwise_equal_after_20_adam_steps(mesh, zero):
    """Otherwise the devices slowly train different models, which no loss curve shows."""
    config = replace(TOY, num_layers=2)
    plan = Plan(mesh, zero=zero, microbatches=2)
    run = run_on_enough_devices(Program(config.build, optax.adam(1e-2), plan))
    state = run.init(0)
    for step in range(20):
        state, metrics = run.step(state, run.put(make_batch("uneven", 16, 64, length=8, seed=step)))
    assert strays((state, metrics)) == []
    assert int(state.step) == 20 and int(state.skipped) == 0


def test_a_copy_of_which_one_bit_differs_is_found():
    """Otherwise the test above sees nothing."""
    devices = jax.devices()
    right = np.arange(4, dtype=np.float32)
    wrong = np.nextafter(right, 9, dtype=np.float32)
    shards = [jax.device_put(wrong if i == 5 else right, device) for i, device in enumerate(devices)]
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    assert strays({"w": jax.make_array_from_single_device_arrays((4,), sharding, shards)}) == ["['w']"]
