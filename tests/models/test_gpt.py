"""GPT, with all that it may switch on, is one model on every mesh."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import ConfigError, ModelError, Plan, Program
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from jaxpar.testing.parity import loss_and_grads_at
from models.gpt import GPTConfig

# Two layers, an odd vocabulary, and everything on.
CONFIG = GPTConfig(
    vocab_size=61, num_layers=2, embed_dim=16, num_heads=8, mlp_dim=32, num_positions=32,
    dropout=0.2, label_smoothing=0.1, z_loss_coef=0.3,
)  # fmt: skip


def run_of(plan, config=CONFIG):
    return run_on_enough_devices(Program(config.build, optax.sgd(0.1), plan))


@pytest.fixture(scope="module")
def expected():
    """A batch of documents, and the same with the first half of its rows masked: whole shards, whole microbatches."""
    batch = make_batch("packed", 16, 61)
    masked = batch | {"weights": batch["weights"] * (np.arange(16) >= 8)[:, None].astype(np.float32)}
    run = run_of(Plan("data=1"))
    return [(batch, run_loss_and_grads(run, batch)) for batch in (batch, masked)]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2", "tensor=8"])
def test_with_dropout_smoothing_and_z_loss_it_equals_one_device(expected, mesh, zero):
    """Otherwise a mesh trains another model: other masks, other targets, a second term of another weight."""
    more = {"remat": "full", "sequence_sharded_norms": True} if zero == 3 else {}
    run = run_of(Plan(mesh, zero=zero, microbatches=2, **more))
    for batch, right in expected:
        assert compare(*run_loss_and_grads(run, batch), *right) == []


def test_dropout_changes_the_gradients_and_every_parameter_has_one(expected):
    """Otherwise parity would hold because dropout does nothing, or because a part of the model is cut off."""
    batch, (loss, grads) = expected[0]
    without = run_loss_and_grads(run_of(Plan("data=1"), replace(CONFIG, dropout=0.0)), batch)
    assert abs(loss - without[0]) > 1e-3
    assert all(np.abs(g).max() > 0 for path, g in grads.items() if not path.endswith("attention.k.bias"))


def test_evaluation_has_neither_dropout_nor_smoothing():
    """Otherwise the validation loss would not be the model's."""
    batch = make_batch("uneven", 8, 61)
    plain = run_of(Plan("data=2"), replace(CONFIG, dropout=0.0, label_smoothing=0.0, z_loss_coef=0.0))
    run = run_of(Plan("data=2"))
    found = run.evaluate(run.init(0), [batch])
    assert found["cross_entropy"] == pytest.approx(plain.evaluate(plain.init(0), [batch])["loss"], rel=1e-6)


def test_positions_that_the_model_has_not_learned_never_pass_in_silence():
    """Otherwise a long row would be trained with the last position's vector again and again."""
    run = run_of(Plan("data=1"), replace(CONFIG, num_positions=8))
    with pytest.raises(ModelError, match="rows have 12 positions, the model has learned ones for num_positions=8"):
        loss_and_grads_at(run, run.init(0), make_batch("ones", 2, 61, length=12))
    batch = make_batch("ones", 2, 61, length=4)
    batch["positions"] = np.full((2, 4), 8, np.int32)
    assert jnp.isnan(loss_and_grads_at(run, run.init(0), batch)[0])


@pytest.mark.parametrize(("wrong", "said"), [({"num_heads": 3}, "num_heads=3"), ({"dropout": 1.0}, "dropout=1.0")])
def test_impossible_values_are_refused(wrong, said):
    """Otherwise they fail deep inside, or give zeros."""
    with pytest.raises(ConfigError, match=said):
        replace(CONFIG, **wrong)
