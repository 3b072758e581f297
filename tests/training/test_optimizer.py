"""AdamW with its schedule, and what it decays."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.errors import ConfigError
from jaxpar.structure import inspect_model
from jaxpar.training.optimizer import OptimizerConfig
from tests.training.tiny import CONFIG


def test_weights_decay_and_scales_of_stacked_layers_do_not():
    """Otherwise the norms' scales, stored with a layer dim in front, would be pulled to zero as if matrices."""
    params = inspect_model(CONFIG.build).params
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.5).build(params, steps=10)
    # As stored: [virtual stage, stage, layer, *dims].
    arrays = {path: jnp.ones((1, 1, 1) * bool(i.stack) + i.dims) for path, i in params.items()}
    zeros = {path: jnp.zeros_like(x) for path, x in arrays.items()}
    updates, _ = optimizer.update(zeros, optimizer.init(arrays), arrays)
    decayed = {path for path, update in updates.items() if float(jnp.abs(update).max()) > 0}
    assert decayed == {path for path in params if not path.endswith("scale")}
    assert {"blocks.attention_norm.scale", "norm.scale"} <= params.keys() - decayed


def test_the_rate_rises_to_its_peak_and_falls_to_its_fraction():
    """Otherwise a run would start too fast or end too slow."""
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    rates = [float(config.rate(step, 14)) for step in range(15)]
    np.testing.assert_allclose(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0])
    np.testing.assert_allclose([rates[9], rates[14]], [1.1, 0.2], rtol=1e-6)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_run_shorter_than_its_warmup_is_all_warmup():
    """Otherwise a trial run of a few steps would be an error, or would divide by zero."""
    rates = [float(OptimizerConfig(learning_rate=1.0, warmup_steps=10).rate(step, 3)) for step in range(3)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3], rtol=1e-6)


def test_impossible_values_are_all_named():
    """Otherwise a typo would show as a loss that does not fall."""
    with pytest.raises(ConfigError, match=r"learning_rate must be more than 0, found -1.0; b2 must be .* found 1.5"):
        OptimizerConfig(learning_rate=-1.0, b2=1.5)
