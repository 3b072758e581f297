"""What tensor parallelism gets wrong elsewhere: gathered logits, row-parallel biases, fused matrices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program
from jaxpar.errors import PlanError
from jaxpar.testing import assert_parity, compare, run_loss_and_grads, run_on_enough_devices
from models.llama import Llama

SMALL = replace(TOY, num_layers=1)
init = nnx.initializers.lecun_normal()


class GatheredLogits(Llama):
    """The head as a user writes it: all logits on every device, and optax's loss."""

    def head(self, x, batch, ctx):
        logits = ctx.constrain(jnp.einsum("btd,vd->btv", self.norm(x), self.table_VD), None, None, None)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return {"cross_entropy": jnp.sum(batch["weights"] * losses)}


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_gathered_and_sharded_logits_give_one_loss(tensor):
    """Otherwise the loss is too high by exactly log(tensor): 0.69, 1.39, 2.08."""
    batch, losses, gradients = make_batch("uneven", 4, SMALL.vocab_size), [], []
    for build in (SMALL.build, lambda rngs: GatheredLogits(SMALL, rngs=rngs)):
        run = run_on_enough_devices(Program(build, optax.sgd(0.1), Plan(f"tensor={tensor}")))
        losses.append(run.evaluate(run.init(0), [batch])["loss"])
        gradients.append(run_loss_and_grads(run, batch))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] == pytest.approx(np.log(SMALL.vocab_size), abs=0.2)
    assert compare(*gradients[0], *gradients[1]) == []


class BiasAlone(nnx.Module):
    """A row-parallel matrix of zeros and a bias 1..8: what comes out is the bias."""

    def __init__(self, *, rngs):
        zeros, bias = nnx.initializers.zeros, lambda key, shape, dtype: jnp.arange(1.0, 9.0)
        self.out = nnx.Linear(
            16, 8, kernel_init=jaxpar.named(zeros, "mlp", None), bias_init=jaxpar.named(bias, None), rngs=rngs
        )

    def __call__(self, x, ctx):
        return self.out(ctx.constrain(jnp.concatenate([x, x], axis=-1), None, None, "mlp"))


class RowParallel(nnx.Module):
    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(BiasAlone, 1, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        return {"sum": jnp.sum(x), "first": jnp.sum(x[..., 0])}

    def terms(self, batch):
        vectors = jnp.float32(batch["x"].shape[0] * batch["x"].shape[1])
        return {"sum": jaxpar.Term(vectors, coef=8.0), "first": jaxpar.Term(vectors, coef=0.0)}


def test_a_row_parallel_bias_is_added_once_and_its_gradient_is_whole():
    """Otherwise four devices add the bias four times, or its gradient is 2 in place of 8."""
    axes = {"x": ("rows", "positions", None)}
    batch = {"x": np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)}
    for mesh in ("tensor=4", "data=2,tensor=4"):
        run = run_on_enough_devices(Program(RowParallel, optax.sgd(0.1), Plan(mesh), batch_axes=axes))
        _, metrics = run.gradients(run.init(0), run.put(batch))
        assert float(metrics["sum"]) == 36 and float(metrics["first"]) == 1
        _, grads = run_loss_and_grads(run, batch)
        assert grads["blocks.out.bias"].tolist() == [[8.0] * 8]


class GateUp(nnx.Module):
    """Gate and up projections in one matrix; the middle dim tells them apart, whatever splits the last one."""

    def __init__(self, dim, mlp, *, rngs):
        fused = jaxpar.named(init, "embed", None, "mlp")
        self.fused = nnx.Param(fused(rngs.params(), (dim, 2, mlp), jnp.float32))
        self.down = nnx.Linear(mlp, dim, use_bias=False, kernel_init=jaxpar.named(init, "mlp", "embed"), rngs=rngs)

    def __call__(self, x, ctx):
        both = ctx.constrain(jnp.einsum("bd,dgf->bgf", x, self.fused[...]), None, None, "mlp")
        return x + self.down(nnx.silu(both[:, 0]) * both[:, 1])


def fused(mlp: int, mesh: str, zero: int = 0) -> Program:
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.blocks = jaxpar.stack(GateUp, 2, dim=6, mlp=mlp, rngs=rngs)

        def embed(self, batch, ctx):
            return batch["x"]

        def head(self, x, batch, ctx):
            return {"squares": jnp.sum(x**2)}

        def terms(self, batch):
            return {"squares": jaxpar.Term(jnp.float32(batch["x"].shape[0]))}

    return Program(Model, optax.sgd(0.1), Plan(mesh, zero=zero), batch_axes={"x": ("rows", None)})


@pytest.mark.parametrize(("mesh", "zero"), [("tensor=4", 0), ("data=4,tensor=2", 3)])
def test_a_fused_gate_and_up_matrix_equals_one_device(mesh, zero):
    """Otherwise a split cuts across gate and up: shapes fit, numbers do not."""
    assert_parity(fused(12, mesh, zero), {"x": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)})


def test_a_fused_matrix_of_one_tensor_size_reads_the_same_under_another():
    """Otherwise what was saved under tensor=2 is shuffled when read under tensor=4."""
    runs = [run_on_enough_devices(fused(12, mesh)) for mesh in ("tensor=2", "tensor=4", "data=1")]
    logical = runs[0].to_logical(runs[0].init(0))
    columns = np.broadcast_to(np.arange(24.0, dtype=np.float32).reshape(2, 12), (2, 6, 2, 12))
    logical.params["blocks.fused"] = jax.device_put(columns, logical.params["blocks.fused"].sharding)
    saved = jax.device_get(runs[0].to_logical(runs[0].from_logical(logical)).params)
    for run in runs:
        target = run.abstract_logical_state
        placed = {path: jax.device_put(saved[path], leaf.sharding) for path, leaf in target.params.items()}
        state = run.to_logical(run.from_logical(replace(run.to_logical(run.init(0)), params=placed)))
        assert np.array_equal(state.params["blocks.fused"], columns)


def test_gate_and_up_that_divide_only_together_are_refused():
    """Otherwise 2 x 3 columns on two devices put one and a half of each on either."""
    with pytest.raises(PlanError, match=r"blocks.fused: dim 2 \('mlp'\) of size 3 does not divide over tensor=2"):
        fused(3, "tensor=2").validate(devices=2)


class FusedHeads(nnx.Module):
    """Queries, keys and values of 8 and 4 heads in one matrix, by kv head: two query heads, the key, the value."""

    def __init__(self, *, rngs):
        fused = jaxpar.named(init, "embed", "kv_heads", None, "head_dim")
        out = jaxpar.named(init, "kv_heads", None, "head_dim", "embed")
        self.fused = nnx.Param(fused(rngs.params(), (6, 4, 4, 4), jnp.float32))
        self.out = nnx.Param(out(rngs.params(), (4, 2, 4, 6), jnp.float32))

    def __call__(self, x, ctx):
        fused = ctx.constrain(jnp.einsum("btd,dkgh->btkgh", x, self.fused[...]), None, None, "kv_heads", None, None)
        q = fused[:, :, :, :2].reshape(*x.shape[:2], 8, 4)
        mixed = ctx.attend(q, fused[:, :, :, 2], fused[:, :, :, 3]).reshape(*x.shape[:2], 4, 2, 4)
        return x + jnp.einsum("btkgh,kghd->btd", mixed, self.out[...])


class FusedAttention(RowParallel):
    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(FusedHeads, 2, rngs=rngs)

    def head(self, x, batch, ctx):
        return {"sum": jnp.sum(x**2), "first": jnp.sum(x[..., 0])}


@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4"])
def test_fused_queries_keys_and_values_equal_one_device(mesh):
    """Otherwise a split of all columns alike gives one device queries and another values."""
    axes = {"x": ("rows", "positions", None)}
    batch = {"x": np.random.default_rng(0).normal(size=(2, 8, 6)).astype(np.float32)}
    assert_parity(Program(FusedAttention, optax.sgd(0.1), Plan(mesh), batch_axes=axes), batch)
