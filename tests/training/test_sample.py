"""Sampling gives what the model says comes next."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar import Plan, Program
from jaxpar.errors import ModelError
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.sample import generate, one_device_context
from models.gpt import GPTConfig
from models.llama import LlamaConfig

SIZES = dict(vocab_size=31, num_layers=2, embed_dim=16, mlp_dim=16)
LLAMA = LlamaConfig(num_heads=4, num_kv_heads=2, head_dim=8, **SIZES)
GPT = GPTConfig(num_heads=4, num_positions=8, **SIZES)
PROMPT = np.array([3, 1, 4], np.int32)
WINDOW = 8


@pytest.fixture(scope="module", params=[LLAMA, GPT], ids=["llama", "gpt"])
def model(request):
    """With larger weights than at the start: else the likeliest token is always the last one again."""
    model = request.param.build(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: 3 * x, state))


@nnx.jit
def scores(model, row):
    return model.logits(row[None], one_device_context(1, row.shape[0]))[0]


def by_hand(model, prompt, count):
    """Every token from the scores of all that is seen, which are computed anew each time."""
    tokens, seen = [], list(prompt)
    for _ in range(count):
        seen = seen if len(seen) <= WINDOW else seen[-WINDOW // 2 :]
        row = jnp.asarray(seen + [7] * (WINDOW - len(seen)), jnp.int32)
        tokens.append(int(jnp.argmax(scores(model, row)[len(seen) - 1])))
        seen.append(tokens[-1])
    return tokens


@pytest.mark.parametrize("prompt", [PROMPT, np.arange(1), np.arange(WINDOW), np.arange(11)], ids=len)
def test_the_likeliest_tokens_with_a_cache_are_those_without(model, prompt):
    """Otherwise a sample would look at padding, at the future, at the wrong positions, or past its window."""
    out = generate(model, prompt, 20, window=WINDOW, temperature=0.0)
    assert out.dtype == np.int32
    assert out.tolist() == by_hand(model, prompt, 20)
    assert len(set(out.tolist())) > 3


def test_a_temperature_draws_by_the_seed(model):
    """Otherwise samples could not be repeated, or would be all alike."""
    first, again, other = (generate(model, PROMPT, 20, window=WINDOW, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_what_is_drawn_has_the_probabilities_of_the_model(model):
    """Otherwise a sample would not show what the model believes."""
    probabilities = jax.nn.softmax(scores(model, jnp.asarray([*PROMPT, 0, 0, 0, 0, 0]))[2] / 2.0)
    drawn = [int(generate(model, PROMPT, 1, window=WINDOW, temperature=2.0, seed=s)[0]) for s in range(300)]
    likeliest = int(jnp.argmax(probabilities))
    assert abs(drawn.count(likeliest) / 300 - float(probabilities[likeliest])) < 0.1


class Neighbour(nnx.Module):
    """Looks at the token before its own behind the back of the context."""

    def __init__(self, causal=None, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (31, 31)))
        self.causal = causal

    def logits(self, tokens, ctx):
        x = jax.nn.one_hot(tokens, 31)
        if self.causal is not None:
            return ctx.attend(x[:, :, None], x[:, :, None], x[:, :, None], causal=self.causal)[:, :, 0]
        return (jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] + x) @ self.table[...]


@pytest.mark.parametrize(
    ("causal", "said"), [(None, r"scores a token otherwise when it comes alone"), (False, r"causal=False")]
)
def test_a_model_that_cannot_go_token_by_token_is_named(causal, said):
    """Otherwise it would give nonsense that looks like a bad model."""
    with pytest.raises(ModelError, match=said):
        generate(Neighbour(causal, rngs=nnx.Rngs(0)), PROMPT, 4, window=WINDOW)


class Windowed(nnx.Module):
    """Attends to itself and the two tokens before."""

    def __init__(self, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (31, 31)))

    def logits(self, tokens, ctx):
        x = (4 * self.table[...][tokens])[:, :, None]
        return ctx.attend(x, x, x, window=3)[:, :, 0]


def test_a_window_of_attention_is_kept_when_tokens_come_one_by_one():
    """Otherwise a model would be sampled with more past than it was trained with."""
    model = Windowed(rngs=nnx.Rngs(0))
    alone = generate(model, PROMPT, 6, window=WINDOW, temperature=0.0)
    tokens = [*PROMPT]
    for _ in range(6):
        tokens.append(int(jnp.argmax(scores(model, jnp.asarray(tokens[-3:]))[-1])))
    assert alone.tolist() == tokens[len(PROMPT) :]


def test_a_model_without_logits_is_named():
    """Otherwise the error would come out of the middle of a compiled loop."""
    with pytest.raises(ModelError, match=r"Linear has no logits\(tokens, ctx\)"):
        generate(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), np.array([1]), 1, window=2)


@pytest.mark.parametrize(("mesh", "zero"), [("tensor=2", 0), ("data=2,tensor=4", 3)])
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_the_model_of_a_run_on_a_tensor_mesh_scores_and_continues_as_on_one_device(config, mesh, zero):
    """Otherwise what is trained on many devices could not be used: a padded vocabulary, heads that lie apart."""
    models = []
    for plan in (Plan("data=1"), Plan(mesh, zero=zero)):
        run = run_on_enough_devices(Program(config.build, optax.sgd(0.1), plan))
        models.append(run.model(run.init(0)))
    one, many = (np.asarray(scores(m, jnp.arange(WINDOW))) for m in models)
    assert many.shape == (WINDOW, 31)
    assert np.abs(many - one).max() <= 1e-5 * np.abs(one).max()
    one, many = (generate(m, PROMPT, 9, window=WINDOW, temperature=0.0) for m in models)
    assert one.tolist() == many.tolist()
