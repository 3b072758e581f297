"""The loss of a vocabulary-sharded head is the textbook's, with label smoothing and z-loss, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import Plan, Program
from jaxpar.parallel.cross_entropy import cross_entropy, cross_entropy_and_z_loss
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from tests.cases.models import Times

AXES = {"x": ("rows", "positions", None), "targets": ("rows", "positions"), "weights": ("rows", "positions")}


class Head(nnx.Module):
    """Nothing but a head: logits are `x @ kernel.T`."""

    def __init__(self, kernel_VD, smoothing, z_coef, *, rngs):
        init = jaxpar.named(lambda key, shape, dtype: jnp.asarray(kernel_VD), "vocab", None)
        self.kernel = nnx.Param(init(rngs.params(), kernel_VD.shape, jnp.float32))
        self.blocks = jaxpar.stack(Times, 1, rngs=rngs)
        self.smoothing, self.z_coef = smoothing, z_coef

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        args = (x, self.kernel[...], batch["targets"], batch["weights"])
        options = dict(label_smoothing=self.smoothing, chunk=5)
        if self.z_coef == 0.0:
            return {"cross_entropy": cross_entropy(*args, **options)}
        total, z_loss = cross_entropy_and_z_loss(*args, **options)
        return {"cross_entropy": total, "z_loss": z_loss}

    def terms(self, batch):
        weight = jnp.sum(batch["weights"])
        z_loss = {"z_loss": jaxpar.Term(weight, coef=self.z_coef)} if self.z_coef else {}
        return {"cross_entropy": jaxpar.Term(weight)} | z_loss


def head(plan, kernel_VD, smoothing=0.0, z_coef=0.0):
    def build(rngs):
        return Head(kernel_VD, smoothing, z_coef, rngs=rngs)

    return run_on_enough_devices(Program(build, optax.sgd(0.1), plan, batch_axes=AXES))


def random(vocab, rows=8, length=6, dim=3):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(rows, length, dim)).astype(np.float32),
        "targets": rng.integers(0, vocab, (rows, length)).astype(np.int32),
        "weights": rng.uniform(0, 2, (rows, length)).astype(np.float32),
    }
    return rng.normal(size=(vocab, dim)).astype(np.float32), batch


def textbook(kernel_VD, batch, smoothing, z_coef, scale=1.0):
    logits = jnp.einsum("btd,vd->btv", batch["x"] * scale, kernel_VD)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], len(kernel_VD)), smoothing)
    losses = optax.softmax_cross_entropy(logits, labels) + z_coef * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(batch["weights"] * losses) / jnp.sum(batch["weights"])


def test_label_smoothing_is_uniform_over_the_whole_vocabulary():
    """Otherwise each device smooths over its own part: 4.71, 4.51, 4.31 or 4.11."""
    kernel_VD, weights = np.arange(8, dtype=np.float32)[:, None], np.ones((1, 1), np.float32)
    batch = {"x": weights[..., None], "targets": np.array([[3]], np.int32), "weights": weights}
    for plan in (Plan("data=1"), Plan("tensor=4")):
        loss, grads = run_loss_and_grads(head(plan, kernel_VD, smoothing=0.1), batch)
        assert loss == pytest.approx(4.408340, abs=1e-6)
        right = jax.nn.softmax(jnp.arange(8.0)) - 0.9 * jax.nn.one_hot(3, 8) - 0.1 / 8
        assert np.allclose(grads["kernel"][:, 0], right, atol=1e-6)


@pytest.mark.parametrize("vocab", [8, 7])
@pytest.mark.parametrize(("smoothing", "z_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_loss_and_gradients_are_the_textbooks_with_a_vocabulary_that_is_split_and_padded(vocab, smoothing, z_coef):
    """Otherwise padding takes a share of the smoothing or of the softmax, or a part of the gradient is lost."""
    kernel_VD, batch = random(vocab)
    right = jax.value_and_grad(textbook, (0, 4))(kernel_VD, batch, smoothing, z_coef, jnp.float32(1))
    for plan in (Plan("data=1"), Plan("data=2,tensor=4", microbatches=2)):
        loss, grads = run_loss_and_grads(head(plan, kernel_VD, smoothing, z_coef), batch)
        assert loss == pytest.approx(float(right[0]), rel=1e-6)
        assert np.allclose(grads["kernel"], right[1][0], rtol=1e-5, atol=1e-6)
        assert np.allclose(grads["blocks.scale"], right[1][1], rtol=1e-5, atol=1e-6)


def test_gradients_of_the_token_weights_are_the_losses():
    """Otherwise weights that a model learns would learn nothing, or the wrong thing."""
    kernel_VD, batch = random(7)
    args = (batch["x"], kernel_VD, batch["targets"])
    logits = jnp.einsum("btd,vd->btv", batch["x"], kernel_VD)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    found = jax.grad(lambda w: cross_entropy(*args, w, chunk=5))(batch["weights"])
    assert np.allclose(found, losses, rtol=1e-5)
    found = jax.grad(lambda w: cross_entropy_and_z_loss(*args, w, chunk=5)[1])(batch["weights"])
    assert np.allclose(found, jax.nn.logsumexp(logits, axis=-1) ** 2, rtol=1e-5)


def test_a_second_term_is_the_same_under_any_accumulation_and_the_terms_add_up_to_the_loss():
    """Otherwise the z-loss fades or explodes with accumulation, or what is logged is not what is trained."""
    kernel_VD, batch = random(7, rows=16)
    expected = None
    for microbatches in (1, 8):
        run = head(Plan("data=2", microbatches=microbatches), kernel_VD, z_coef=0.3)
        _, metrics = run.gradients(run.init(0), run.put(batch))
        m = {name: float(value) for name, value in metrics.items()}
        assert m["loss"] == pytest.approx(m["cross_entropy"] + 0.3 * m["z_loss"], abs=1e-6)
        assert min(m.values()) >= 0
        found = run_loss_and_grads(run, batch)
        expected = expected or found
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        for path, grad in expected[1].items():
            assert np.abs(found[1][path] - grad).max() <= 1e-5 * np.abs(grad).max(), path
