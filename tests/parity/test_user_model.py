"""Models of other shapes, such as users bring, need no change in jaxpar to equal one device."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import Plan, Program
from jaxpar.testing import compare, one_device, run_loss_and_grads, run_on_enough_devices

init = nnx.initializers.lecun_normal()
IMAGES = {"images": ("rows", None, None, None), "targets": ("rows", None), "importance": ("rows",)}


class Mixer(nnx.Module):
    """A layer that knows nothing of jaxpar's models: nnx.Linear, with biases, and no logical name for most dims."""

    def __init__(self, dim, *, rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 24, kernel_init=jaxpar.named(init, "embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(24, dim, kernel_init=jaxpar.named(init, "mlp", "embed"), rngs=rngs)

    def __call__(self, x, ctx):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Patches(nnx.Module):
    """Image regression: patches by convolution, mixers, and two terms that count different things."""

    def __init__(self, *, rngs):
        self.patch = nnx.Conv(3, 20, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.blocks = jaxpar.stack(Mixer, 3, dim=20, rngs=rngs)
        self.out = nnx.Linear(20, 5, rngs=rngs)

    def embed(self, batch, ctx):
        x = self.patch(batch["images"])
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def head(self, x, batch, ctx):
        guess = self.out(x.mean(axis=1))
        return {
            "squares": jnp.sum((guess - batch["targets"]) ** 2),
            "ranking": jnp.sum(batch["importance"] * jnp.abs(guess).max(axis=1)),
        }

    def terms(self, batch):
        return {
            "squares": jaxpar.Term(jnp.float32(batch["targets"].size)),
            "ranking": jaxpar.Term(jnp.sum(batch["importance"]), coef=0.3),
        }


def images(rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "images": rng.normal(size=(rows, 8, 12, 3)).astype(np.float32),
        "targets": rng.normal(size=(rows, 5)).astype(np.float32),
        "importance": np.arange(rows, dtype=np.float32),
    }


class Residual(nnx.Module):
    """A layer of its own width inside, that also reports a balance loss: additive over rows."""

    def __init__(self, dim, width, *, rngs):
        self.up = nnx.Linear(dim, width, use_bias=False, kernel_init=jaxpar.named(init, None, "mlp"), rngs=rngs)
        self.down = nnx.Linear(width, dim, kernel_init=jaxpar.named(init, "mlp", None), rngs=rngs)

    def __call__(self, x, ctx):
        hidden = jnp.tanh(self.up(x))
        return x + self.down(hidden), {"balance": jnp.sum(hidden.mean(axis=-1) ** 2)}


class TwoStacks(nnx.Module):
    """Two stacks one after the other, of layers with different parameters; only the second reports a total."""

    def __init__(self, *, rngs):
        self.first = jaxpar.stack(Mixer, 2, dim=12, rngs=rngs)
        self.second = jaxpar.stack(Residual, 3, dim=12, width=8, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        return {"energy": jnp.sum(x**2)}

    def terms(self, batch):
        rows = jnp.float32(batch["x"].shape[0])
        return {"energy": jaxpar.Term(rows), "balance": jaxpar.Term(rows, coef=0.5)}


def program(build, axes, mesh: str = "data=1", **options) -> Program:
    return Program(build, optax.sgd(0.1), Plan(mesh, **options), batch_axes=axes)


patches = partial(program, Patches, IMAGES)
two_stacks = partial(program, TwoStacks, {"x": ("rows", None)})


@pytest.fixture(scope="module")
def expected():
    x = {"x": np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)}
    found = {}
    for name, make, batch in (("patches", patches, images()), ("two stacks", two_stacks, x)):
        found[name] = batch, run_loss_and_grads(run_on_enough_devices(one_device(make())), batch)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2"])
def test_a_convolution_with_mlps_and_two_terms_equals_one_device(expected, mesh, zero):
    """Otherwise the strategies hold for jaxpar's own models alone."""
    batch, right = expected["patches"]
    found = run_loss_and_grads(run_on_enough_devices(patches(mesh, zero=zero, microbatches=2)), batch)
    assert compare(*found, *right) == []


@pytest.mark.parametrize(
    ("mesh", "zero", "microbatches", "remat"),
    [("data=8", 3, 2, "none"), ("data=4,tensor=2", 2, 4, "full"), ("data=2,tensor=4", 0, 1, "dots")],
)
def test_two_stacks_and_totals_of_layers_equal_one_device(expected, mesh, zero, microbatches, remat):
    """Otherwise a second stack, or a loss that layers add up, is lost, doubled or left out of the gradient."""
    batch, right = expected["two stacks"]
    run = run_on_enough_devices(two_stacks(mesh, zero=zero, microbatches=microbatches, remat=remat))
    assert compare(*run_loss_and_grads(run, batch), *right) == []


def test_the_objective_is_the_sum_of_its_terms_each_over_its_own_count(expected):
    """Otherwise a term that counts rows is divided by elements, or fades with accumulation."""
    run = run_on_enough_devices(patches("data=4,tensor=2", microbatches=2))
    _, metrics = run.gradients(run.init(0), run.put(images()))
    m = {name: float(value) for name, value in metrics.items()}
    assert m["weight/squares"] == 16 * 5 and m["weight/ranking"] == 120
    assert m["loss"] == pytest.approx(m["squares"] + 0.3 * m["ranking"], rel=1e-6)
    assert m["loss"] == pytest.approx(expected["patches"][1][0], rel=1e-5)


def test_one_term_whose_weights_are_all_zero_leaves_the_other(expected):
    """Otherwise a batch without importance gives NaN for the whole objective."""
    run = run_on_enough_devices(patches("data=8", zero=1))
    batch = images() | {"importance": np.zeros(16, np.float32)}
    state, metrics = run.step(run.init(0), run.put(batch))
    assert float(metrics["ranking"]) == 0 and float(metrics["skipped"]) == 0
    assert float(metrics["loss"]) == float(metrics["squares"]) > 0
    assert int(state.skipped) == 0
