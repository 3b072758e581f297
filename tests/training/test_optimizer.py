"""What an optimizer's config makes of parameters: what decays, what is frozen, what is averaged, how fast it learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import ScheduleFreeState

from jaxpar.errors import ConfigError
from jaxpar.structure import ParamInfo, inspect_model
from jaxpar.training.groups import ParameterGroup
from jaxpar.training.matrices import MatrixDims, decays, matrix_dims
from jaxpar.training.optimizer import OptimizerConfig
from tests.training.tiny import CONFIG

BIASED = replace(CONFIG, attention_bias=True, mlp_bias=True, qk_norm=True)
PARAMS = inspect_model(BIASED.build).params


def first_update(config: OptimizerConfig, gradient: float = 0.0, value: float = 1.0):
    """Every parameter `value`, every gradient `gradient`: the largest change of each, and the optimizer's state."""
    optimizer = config.build(PARAMS, steps=10)
    # As stored: [virtual stage, stage, layer, *dims].
    arrays = {path: jnp.full((1, 1, 1) * bool(i.stack) + i.dims, value) for path, i in PARAMS.items()}
    gradients = {path: jnp.full_like(x, gradient) for path, x in arrays.items()}
    updates, state = optimizer.update(gradients, optimizer.init(arrays), arrays)
    return {path: float(jnp.abs(update).max()) for path, update in updates.items()}, state


def test_matrices_and_tables_decay_and_norms_and_biases_do_not():
    """Otherwise a bias over [heads, head_dim], or a scale with a layer dim in front, is pulled to zero as a matrix."""
    changes, _ = first_update(OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.5))
    decayed = {path for path, change in changes.items() if change > 0}
    assert decayed == {path for path in PARAMS if path.endswith(("kernel", "embedding"))}
    assert {"blocks.attention.q.bias", "blocks.attention.q_norm.scale", "norm.scale"} <= PARAMS.keys() - decayed


NAMES = {
    ("embed",): None,
    ("heads", "head_dim"): None,
    ("experts", "mlp"): None,
    ("embed", "mlp"): MatrixDims((0,), (1,)),
    ("embed", "kv_heads", "head_dim"): MatrixDims((0,), (1, 2)),
    ("heads", "head_dim", "embed"): MatrixDims((0, 1), (2,)),
    ("experts", "embed", "mlp"): MatrixDims((1,), (2,)),
    ("embed", "experts"): MatrixDims((0,), (1,)),
    (None, None): MatrixDims((0,), (1,)),
}


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_a_matrix_is_told_by_names(names):
    """Otherwise Muon turns the wrong dims, and decay takes a bias for a matrix."""
    info = ParamInfo("x", (2,) * len(names), jnp.float32, names, None)
    assert matrix_dims(info) == NAMES[names] and decays(info) == (NAMES[names] is not None)


@pytest.mark.parametrize("names", [("vocab", "embed"), ("positions", "embed"), (None, None, "embed")], ids=str)
def test_tables_and_what_is_no_plain_map_decay_without_being_matrices(names):
    """Otherwise Muon makes the rows of an embedding orthogonal."""
    info = ParamInfo("x", (2,) * len(names), jnp.float32, names, None)
    assert matrix_dims(info) is None and decays(info)


def test_groups_set_rate_and_decay_by_path_and_the_first_that_matches_counts():
    """Otherwise `embedding` would take the settings of `*`, or none."""
    groups = (ParameterGroup("embedding", weight_decay=0.0), ParameterGroup("*", learning_rate=0.5, weight_decay=1.0))
    config = OptimizerConfig("sgd", learning_rate=0.1, warmup_steps=0, groups=groups)
    changes, _ = first_update(config)
    assert changes.pop("embedding") == 0
    np.testing.assert_allclose(list(changes.values()), 0.05, rtol=1e-6)


def test_a_frozen_parameter_has_no_state_and_no_part_in_the_clipped_norm():
    """Otherwise it takes memory, and a large gradient of what is frozen slows down all else."""
    groups = (ParameterGroup("blocks.*", frozen=True), ParameterGroup("*embedding", frozen=True))
    config = OptimizerConfig("sgd", learning_rate=1.0, warmup_steps=0, weight_decay=0.0, b1=0.9, groups=groups)
    changes, state = first_update(replace(config, clip_norm=1e9), gradient=3.0)
    assert {path for path, change in changes.items() if change} == {"norm.scale"}
    assert changes["norm.scale"] == pytest.approx(3.0)
    clipped, _ = first_update(config, gradient=3.0)
    assert clipped["norm.scale"] == pytest.approx(1 / np.sqrt(CONFIG.embed_dim), rel=1e-5)
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sizes == [CONFIG.embed_dim]


def test_a_group_that_matches_nothing_is_an_error():
    """Otherwise a misspelt path would leave a parameter unfrozen in silence."""
    with pytest.raises(
        ConfigError,
        match=r"'blocks.attn.q.kernel' matches no parameter \(near 'blocks.attention.q.kernel'\). There are: ",
    ):
        OptimizerConfig(groups=(ParameterGroup("blocks.attn.q.kernel", frozen=True),)).build(PARAMS, 10)
    with pytest.raises(ConfigError, match="freeze every parameter"):
        OptimizerConfig(groups=(ParameterGroup("*", frozen=True),)).build(PARAMS, 10)


def test_the_rate_rises_to_its_peak_and_falls_to_its_fraction():
    """Otherwise a run would start too fast or end too slow."""
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    rates = [float(config.rate(step, 14)) for step in range(15)]
    np.testing.assert_allclose(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0])
    np.testing.assert_allclose([rates[9], rates[14]], [1.1, 0.2], rtol=1e-6)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_schedules_fall_as_their_names_say():
    """Otherwise a run under `wsd` would decay from the start, or one under `constant` at all."""
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_fraction=0.2, decay_fraction=0.4)

    def rates(schedule):
        return [float(replace(config, schedule=schedule).rate(update, 12)) for update in range(13)]

    np.testing.assert_allclose(rates("linear")[2:], np.linspace(1.0, 0.2, 11), rtol=1e-6)
    np.testing.assert_allclose(rates("wsd"), [0.5] + [1.0] * 7 + np.linspace(1.0, 0.2, 6)[1:].tolist(), rtol=1e-6)
    np.testing.assert_allclose(rates("constant"), [0.5] + [1.0] * 12)


def test_a_run_shorter_than_its_warmup_is_all_warmup():
    """Otherwise a trial run of a few steps would be an error, or would divide by zero."""
    rates = [float(OptimizerConfig(learning_rate=1.0, warmup_steps=10).rate(step, 3)) for step in range(3)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3], rtol=1e-6)


def test_impossible_values_are_all_named():
    """Otherwise a typo would show as a loss that does not fall."""
    with pytest.raises(ConfigError, match=r"learning_rate must be more than 0, found -1.0; b2 must be .* found 1.5"):
        OptimizerConfig(learning_rate=-1.0, b2=1.5)


def test_schedule_free_refuses_a_schedule_and_a_second_average():
    """Otherwise its own average would be weighed by a falling rate."""
    with pytest.raises(ConfigError, match=r"schedule must be constant with schedule_free, found cosine; average"):
        OptimizerConfig("schedule_free", average=0.9)


def test_schedule_free_weighs_its_average_by_the_rate_of_the_same_update():
    """Otherwise the average runs a step ahead of the rate: optax counts from 1 there, and from 0 everywhere else."""
    _, state = first_update(OptimizerConfig("schedule_free", learning_rate=1.0, warmup_steps=4, schedule="constant"))
    (node,) = [n for n in jax.tree.leaves(state, is_leaf=is_schedule_free) if is_schedule_free(n)]
    assert float(node.weight_sum) == pytest.approx(0.25**2)


def is_schedule_free(node) -> bool:
    return isinstance(node, ScheduleFreeState)
