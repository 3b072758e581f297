"""A checkpoint does not know whether the optimizer's state waited on the host."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.run import Run
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.average import parameter_average

# 50 does not divide over the shards: stored padded.
VOCAB = 50


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    model = replace(TOY, num_layers=2, vocab_size=VOCAB)
    optimizer = optax.chain(optax.adamw(1e-2), parameter_average(0.9))
    plans = {"kept": Plan("data=2,tensor=2", zero=3), "offloaded": Plan("data=4", zero=1, offload=("optimizer",))}
    return {name: run_on_enough_devices(Program(model.build, optimizer, plan)) for name, plan in plans.items()}


@pytest.mark.parametrize(("saves", "restores"), [("kept", "offloaded"), ("offloaded", "kept")])
def test_either_restores_what_the_other_saved_and_trains_on(tmp_path, runs, saves, restores):
    """Otherwise offload could not be switched on when memory runs short, or off again."""
    saver, restorer = runs[saves], runs[restores]
    batch = make_batch("uneven", 8, VOCAB)
    state, _ = saver.step(saver.init(0), saver.put(batch))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saver, state, {})
    checkpoints.close()
    restored = checkpoints.restore(restorer).state
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored.opt_state)}
    assert ("pinned_host" in kinds) == (restores == "offloaded")
    logical = [
        jax.device_get((s.params, s.opt_state)) for s in (saver.to_logical(state), restorer.to_logical(restored))
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, logical), strict=True))
    _, metrics = restorer.step(restored, restorer.put(batch))
    assert float(metrics["skipped"]) == 0
