"""The averaged parameters that a run is evaluated with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxpar.errors import ConfigError
from jaxpar.structure import inspect_model
from jaxpar.training.average import parameter_average, to_averaged
from jaxpar.training.evaluate import Evaluate
from jaxpar.training.groups import ParameterGroup
from jaxpar.training.optimizer import OptimizerConfig
from tests.training.tiny import CONFIG, make_data, make_run

PARAMS = inspect_model(CONFIG.build).params
SGD = OptimizerConfig("sgd", learning_rate=0.1, warmup_steps=0, schedule="constant")


def trained(config: OptimizerConfig, steps: int):
    """A run, its state, and the parameters after each step, the initial ones first."""
    run, data = make_run("data=2,tensor=2", zero=3, optimizer=config.build(PARAMS, steps)), make_data()
    state = run.init(0)
    found = [logical(run, state)]
    for _ in range(steps):
        state, _ = run.step(state, run.put(next(data)))
        found.append(logical(run, state))
    return run, state, found


def logical(run, state):
    return jax.device_get(run.to_logical(state).params)


def test_the_average_is_that_of_the_parameters_after_each_update_and_frozen_ones_are_as_they_are():
    """Otherwise it lags by an update, weighs the initial parameters for ever, or lacks what is frozen."""
    config = replace(SGD, average=0.3, groups=(ParameterGroup("blocks.mlp.*", frozen=True),))
    run, state, values = trained(config, 4)
    averaged = to_averaged(run)(state)
    found = logical(run, averaged)
    for path in PARAMS:
        want = values[0][path]
        for update, value in enumerate(values[1:]):
            keep = min(0.3, (1 + update) / (10 + update))
            want = keep * want + (1 - keep) * value[path]
        np.testing.assert_allclose(found[path], want, rtol=1e-5, atol=1e-6, err_msg=path)
    assert np.array_equal(found["blocks.mlp.up.kernel"], values[0]["blocks.mlp.up.kernel"])
    assert not np.array_equal(found["embedding"], values[-1]["embedding"])


def test_averaged_parameters_lie_like_parameters_and_the_given_state_lives_on():
    """Otherwise an evaluation gathers the model, or ends the run."""
    run, state, _ = trained(replace(SGD, average=0.9), 1)
    averaged = to_averaged(run)(state)
    for path, x in averaged.params.items():
        assert x.shape == state.params[path].shape and x.sharding == state.params[path].sharding
    run.step(state, run.put(next(make_data())))


def test_schedule_free_is_evaluated_at_its_own_average():
    """Otherwise it is evaluated where gradients are taken, which is worse."""
    run, state, values = trained(replace(SGD, name="schedule_free"), 3)
    found = logical(run, to_averaged(run)(state))
    opt_state = run.to_logical(state).opt_state
    (node,) = [n for n in jax.tree.leaves(opt_state, is_leaf=is_schedule_free) if is_schedule_free(n)]
    want = schedule_free_eval_params(jax.device_get(node), values[-1])
    for path in PARAMS:
        np.testing.assert_allclose(found[path], want[path], rtol=1e-5, atol=1e-6, err_msg=path)


def is_schedule_free(node) -> bool:
    return isinstance(node, ScheduleFreeState)


def test_a_run_is_evaluated_with_its_average():
    """Otherwise the average costs memory and tells nobody anything."""
    run, state, _ = trained(replace(SGD, average=0.9), 2)
    batches, records = [next(make_data())], []
    loop: Any = SimpleNamespace(
        run=run, state=state, step=2, settle=lambda: None, record=lambda _, record: records.append(record)
    )
    callback = Evaluate(lambda: {"text": batches}, every=2)
    callback.on_start(loop)
    callback.on_step(loop)
    plain, averaged = (run.evaluate(s, batches)["loss"] for s in (state, to_averaged(run)(state)))
    assert records[0]["validation_loss"] == averaged != plain


def test_without_an_average_the_state_is_as_it_is():
    """Otherwise every evaluation would cost a copy."""
    run = make_run(optimizer=optax.sgd(0.1))
    state = run.init(0)
    assert to_averaged(run)(state) is state


def test_an_impossible_decay_is_an_error():
    """Otherwise an average that never moves, or is none, would be evaluated."""
    with pytest.raises(ConfigError, match=r"between 0 and 1, found 1\.0"):
        parameter_average(1.0)
