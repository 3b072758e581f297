"""Sampling gives what the model says comes next."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.errors import ModelError
from jaxpar.training.sample import generate, one_device_context
from tests.training.tiny import CONFIG


@pytest.fixture(scope="module")
def model():
    return CONFIG.build(nnx.Rngs(0))


def by_hand(model, prompt, count, window):
    tokens = list(prompt)
    for _ in range(count):
        seen = np.array(tokens[-window:], np.int32)[None]
        logits = model.logits(jnp.asarray(seen), one_device_context(1, seen.shape[1]))
        tokens.append(int(jnp.argmax(logits[0, -1])))
    return tokens[len(prompt) :]


def test_the_likeliest_tokens_are_those_of_the_model_on_the_last_tokens_alone(model):
    """Otherwise a sample would look at padding, at the future, or past its window."""
    prompt = np.array([3, 1, 4], np.int32)
    out = generate(model, prompt, 9, window=8, temperature=0.0)
    assert out.dtype == np.int32
    assert out.tolist() == by_hand(model, prompt, 9, 8)


def test_a_temperature_draws_by_the_seed(model):
    """Otherwise samples could not be repeated, or would be all alike."""
    prompt = np.array([3, 1, 4], np.int32)
    first, again, other = (generate(model, prompt, 9, window=8, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_a_model_without_logits_is_named():
    """Otherwise the error would come out of the middle of a compiled loop."""
    with pytest.raises(ModelError, match=r"Linear has no logits\(tokens, ctx\)"):
        generate(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), np.array([1]), 1, window=2)
