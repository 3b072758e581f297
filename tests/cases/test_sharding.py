"""Gradients of replicated parameters, dims that do not divide, and where optimizer state lies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import TOY
from jaxpar import Plan, Program
from jaxpar.mesh import make_mesh
from jaxpar.placement import place
from jaxpar.structure import ParamInfo, Structure
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from tests.cases.models import Times

init = nnx.initializers.lecun_normal()


class Squares(nnx.Module):
    """`sum((w x)^2)`, w = 3."""

    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Times, 1, 3.0, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        return {"squares": jnp.sum(x**2)}

    def terms(self, batch):
        return {"squares": jaxpar.Term(jnp.float32(batch["x"].shape[0]), coef=8.0)}


@pytest.mark.parametrize("zero", [0, 3])
def test_the_gradient_of_a_replicated_parameter_is_summed_once(zero):
    """Otherwise eight devices make it 6720 in place of 840."""
    program = Program(Squares, optax.sgd(0.1), Plan("data=8", zero=zero), batch_axes={"x": ("rows",)})
    loss, grads = run_loss_and_grads(run_on_enough_devices(program), {"x": np.arange(8, dtype=np.float32)})
    assert loss == 9 * 140 and grads["blocks.scale"].tolist() == [840.0]


class PerSample(nnx.Module):
    """A head that takes gradients itself, one per row: those of `p . x` are the rows."""

    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Times, 1, rngs=rngs)
        self.p = nnx.Param(jnp.ones(3))

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        p = self.p[...]
        grads = jax.vmap(lambda row: jax.grad(lambda p: jnp.sum(p * row))(p))(x)
        return {"difference": jnp.sum(jnp.abs(grads - x)), "size": jnp.sum(jnp.abs(grads))}

    def terms(self, batch):
        rows = jnp.float32(batch["x"].shape[0])
        return {"difference": jaxpar.Term(rows), "size": jaxpar.Term(rows)}


def test_gradients_that_a_model_takes_itself_are_those_of_its_own_rows():
    """Otherwise a gradient penalty sums rows of other devices."""
    program = Program(PerSample, optax.sgd(0.1), Plan("data=8"), batch_axes={"x": ("rows", None)})
    run = run_on_enough_devices(program)
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    _, metrics = run.gradients(run.init(0), run.put({"x": x}))
    assert float(metrics["difference"]) == 0
    assert float(metrics["size"]) == pytest.approx(np.abs(x).sum() / 16, rel=1e-6)


def test_a_dim_that_does_not_divide_is_stored_padded_not_whole():
    """Otherwise 17 rows are kept by every device, in silence."""
    info = ParamInfo("table", (17, 3), np.dtype("float32"), (None, None), None)
    plan = Plan("data=8", zero=3)
    (placement,) = place(Structure(None, (), {"table": info}), plan, make_mesh(plan.shape)).values()
    assert placement.storage_shape == (24, 3) and placement.view_shape == (17, 3)
    assert placement.notes == ("stored padded: (17, 3) as (24, 3)",)


def test_a_vocabulary_of_17_lies_in_3_rows_on_each_of_8_devices_and_exports_17():
    """Otherwise each device holds all 17 rows (1088 bytes in place of 192), or an export has rows of padding."""
    config = replace(TOY, vocab_size=17, embed_dim=16, num_layers=1)
    run = run_on_enough_devices(Program(config.build, optax.adam(0.1), Plan("tensor=8")))
    state = run.init(0)
    for stored in (state.params["embedding"], state.opt_state[0].mu["embedding"]):
        assert stored.shape == (24, 16)
        assert {shard.data.nbytes for shard in stored.addressable_shards} == {192}
    assert run.model(state).embedding.shape == (17, 16)
    assert "stored padded: (17, 16) as (24, 16)" in run.placements["embedding"].notes


class Matrix(nnx.Module):
    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jaxpar.named(init, None, "mlp")(rngs.params(), (16, 16), jnp.float32))

    def __call__(self, x, ctx):
        return x @ self.kernel[...]


class Matrices(Squares):
    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Matrix, 4, rngs=rngs)


def state_of(optimizer, zero: int):
    program = Program(Matrices, optimizer, Plan("data=2,tensor=4", zero=zero), batch_axes={"x": ("rows", None)})
    run = run_on_enough_devices(program)
    return run, run.init(0)


@pytest.mark.parametrize("zero", [1, 3])
def test_moments_lie_where_their_parameter_is_updated(zero):
    """Otherwise moments are replicated over the layer axis, or pull the model onto another sharding."""
    run, state = state_of(optax.adam(0.1), zero)
    spec = jax.P(None, "pipe", None, ("data", "seq", "expert"), "tensor")
    for moment in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert moment["blocks.kernel"].shape == (1, 1, 4, 16, 16)
        assert moment["blocks.kernel"].sharding.is_equivalent_to(jax.NamedSharding(run.mesh, spec), 5)
        assert {shard.data.size for shard in moment["blocks.kernel"].addressable_shards} == {4 * 16 * 16 // 8}
    kernel = state.params["blocks.kernel"]
    assert kernel.addressable_shards[0].data.size == 4 * 16 * 16 // (8 if zero == 3 else 4)


def test_the_optimizer_changes_no_parameter():
    """Otherwise the choice of optimizer moves the model, or draws it anew."""
    states = [state_of(optimizer, 3)[1] for optimizer in (optax.sgd(0.1), optax.adam(0.1))]
    a, b = (state.params["blocks.kernel"] for state in states)
    assert np.array_equal(a, b) and a.sharding == b.sharding


def test_factored_moments_of_lower_rank_get_a_legal_place():
    """Otherwise adafactor cannot be used with sharded parameters."""
    run, state = state_of(optax.adafactor(0.1, min_dim_size_to_factor=8), 1)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.opt_state)}
    assert (1, 1, 4, 16) in shapes, shapes
    state, metrics = run.step(state, run.put({"x": np.ones((4, 16), np.float32)}))
    assert float(metrics["skipped"]) == 0
