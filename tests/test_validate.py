"""What cannot be right is refused before anything compiles, with every number and the way to mend it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import TOY, make_batch
from jaxpar import BatchError, ModelError, Plan, PlanError, Program, token_shapes
from jaxpar.testing import run_on_enough_devices

init = nnx.initializers.lecun_normal()


@pytest.fixture(autouse=True)
def no_compile(monkeypatch):
    """Every error here must come before XLA is asked for anything."""

    def compile(*args, **kwargs):
        raise AssertionError("compiled before it was refused")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


def problems(plan: Plan, config=TOY, rows: int = 16, length: int = 32, devices: int = 8) -> list[str]:
    program = Program(config.build, optax.sgd(0.1), plan)
    with pytest.raises(PlanError) as caught:
        program.validate(token_shapes(rows, length), devices)
    return caught.value.problems


def test_rows_that_do_not_divide_say_how_many_would():
    """Otherwise rows would be dropped, or jax would speak of a reshape."""
    assert problems(Plan("data=4,tensor=2", microbatches=2), rows=12) == [
        "12 rows do not divide into data x expert x microbatches = 4 x 1 x 2 = 8 parts; give a positive multiple of 8"
    ]
    assert "give a positive multiple of 8" in problems(Plan("data=8"), rows=0)[0]


def test_positions_that_do_not_divide_are_refused_where_norms_share_them():
    """Otherwise a device would hold positions that are not there."""
    (problem,) = problems(Plan("tensor=8", sequence_sharded_norms=True), length=30)
    assert "30 positions do not divide over tensor=8" in problem and "give a multiple of 8, or turn it off" in problem


@pytest.mark.parametrize(
    ("sizes", "path", "message"),
    [
        (
            {"num_heads": 4, "num_kv_heads": 4},
            "attention.q.kernel",
            "('heads') of size 4 does not divide over tensor=8",
        ),
        ({"mlp_dim": 36}, "mlp.gate.kernel", "('mlp') of size 36 does not divide over tensor=8"),
        ({"num_heads": 24, "num_kv_heads": 12}, "attention.k.kernel", "('kv_heads') of size 12 does not divide"),
    ],
)
def test_dims_that_do_not_divide_over_tensor_are_listed_with_what_would(sizes, path, message):
    """Otherwise a whole matrix would be replicated in silence, or heads cut in two."""
    found = problems(Plan("tensor=8"), replace(TOY, **sizes))
    (problem,) = [p for p in found if p.startswith(f"blocks.{path}:")]
    assert message in problem and "choose tensor among [1, 2," in problem and "or make the dim" in problem


def test_several_problems_are_listed_together():
    """Otherwise a user mends one, waits for a cluster, and meets the next."""
    found = problems(Plan("tensor=4,data=4", microbatches=3), replace(TOY, mlp_dim=66), rows=16)
    assert any("needs 16 devices, found 8" in p for p in found)
    assert any("blocks.mlp.down.kernel" in p and "66" in p for p in found)
    assert any("16 rows do not divide" in p for p in found)


class Layer(nnx.Module):
    def __init__(self, *names, rngs):
        self.kernel = nnx.Param(jaxpar.named(init, *names)(rngs.params(), (8, 8), jnp.float32))

    def __call__(self, x, ctx):
        return x @ self.kernel[...]


class Model(nnx.Module):
    def __init__(self, layer, *args, rngs):
        self.blocks = jaxpar.stack(layer, 2, *args, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        return {"sum": jnp.sum(x)}

    def terms(self, batch):
        return {"sum": jaxpar.Term(jnp.float32(batch["x"].shape[0]))}


def program(layer, *args, model=Model) -> Program:
    axes = {"x": ("rows", None)}
    return Program(lambda rngs: model(layer, *args, rngs=rngs), optax.sgd(0.1), Plan("data=2"), batch_axes=axes)


def lower(program: Program) -> None:
    shapes = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    run_on_enough_devices(program).lower(shapes)


def test_an_unknown_logical_name_is_named_with_the_nearest_known_one():
    """Otherwise a misspelt name means replication in silence."""
    with pytest.raises(PlanError, match=r"blocks.kernel has the unknown logical name 'emebd'; did you mean 'embed'\?"):
        program(Layer, "emebd", "mlp").validate(devices=2)


def test_two_names_on_one_mesh_axis_are_refused_with_both():
    """Otherwise one of the two dims is replicated, and nobody chose which."""
    with pytest.raises(PlanError, match=r"blocks.kernel .* puts 'heads' and 'mlp' on the one mesh axis 'tensor'"):
        program(Layer, "heads", "mlp").validate(devices=2)


def test_names_that_do_not_match_the_rank_are_refused():
    """Otherwise the wrong dim is split."""
    with pytest.raises(ModelError, match=r"blocks.kernel has 2 dims .* but 1 logical names: \('embed',\)"):
        program(Layer, "embed").validate(devices=2)


class WithDropout(Layer):
    def __init__(self, *, rngs):
        super().__init__(None, None, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_flax_dropout_in_a_layer_is_refused_with_what_to_use():
    """Otherwise every data shard would have the same mask."""
    with pytest.raises(ModelError, match=r"state that is not a parameter: blocks\.dropout\.rngs.* use ctx.dropout"):
        program(WithDropout).validate(devices=2)


class MakesState(Layer):
    def __call__(self, x, ctx):
        self.seen = nnx.Variable(jnp.sum(x))
        return super().__call__(x, ctx)


def test_state_made_in_a_call_is_refused():
    """Otherwise it is dropped in silence after every layer."""
    with pytest.raises(ModelError, match=r"a layer of 'blocks' creates state in its call.*make it in __init__"):
        lower(program(MakesState, None, None))


class ChangesShape(Layer):
    def __call__(self, x, ctx):
        return jnp.concatenate([x, x], axis=-1)


def test_a_layer_that_changes_the_shape_is_refused_with_both():
    """Otherwise a loop over layers fails inside jax, without the layer's name."""
    with pytest.raises(ModelError, match=r"'blocks' must keep the shape of x: took \(2, 8\), gave \(2, 16\)"):
        lower(program(ChangesShape, None, None))


class TotalPerRow(Model):
    def head(self, x, batch, ctx):
        return {"sum": x.sum(axis=-1)}


class NoTerm(Model):
    def head(self, x, batch, ctx):
        return {"sum": jnp.sum(x), "extra": jnp.sum(x)}


class NumberAsTerm(Model):
    def terms(self, batch):
        return {"sum": 4.0}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TotalPerRow, r"totals are sums over rows and positions, scalars; found shapes \{'sum': \(2,\)\}"),
        (NoTerm, r"totals \['extra'\] have no term; terms\(batch\) declares \['sum'\]"),
        (NumberAsTerm, r"terms\(batch\) needs scalars as jaxpar.Term\(weight, coef\), by name; wrong: \['sum'\]"),
    ],
)
def test_totals_and_terms_that_do_not_fit_are_refused(model, message):
    """Otherwise a part of the loss is dropped, or divided by the wrong count."""
    with pytest.raises(ModelError, match=message):
        lower(program(Layer, None, None, model=model))


class Headless(nnx.Module):
    def __init__(self, layer, *, rngs):
        self.blocks = jaxpar.stack(layer, 1, None, None, rngs=rngs)

    def embed(self, batch, ctx): ...


class Stackless(Model):
    def __init__(self, layer, *, rngs):
        self.block = layer(None, None, rngs=rngs)


class Nested(Model):
    def __init__(self, layer, *, rngs):
        self.blocks = jaxpar.stack(layer, 1, None, None, rngs=rngs)
        self.inner = Stackless(layer, rngs=rngs)
        self.inner.more = jaxpar.stack(layer, 1, None, None, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Headless, r"Headless lacks head, terms; a model needs embed\(batch, ctx\)"),
        (Stackless, r"Stackless has no stack of layers; make one with jaxpar.stack"),
        (Nested, r"stacks must be attributes of the model itself, found one inside: inner.more"),
    ],
)
def test_a_model_that_misses_a_part_of_the_protocol_says_which(model, message):
    """Otherwise it fails as an attribute error inside a traced function."""
    with pytest.raises(ModelError, match=message):
        program(Layer, model=model).validate(devices=2)


@pytest.fixture(scope="module")
def run():
    return run_on_enough_devices(Program(TOY.build, optax.sgd(0.1), Plan("data=4,tensor=2")))


def changed(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    return make_batch("ones", 8, 64) | {name: x}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            changed("segmnets", np.ones((8, 32), np.int32)),
            "unknown array 'segmnets' in the batch; did you mean 'segments'",
        ),
        ({"tokens": np.ones((8, 32), np.int32)}, "the batch lacks targets, weights; it has tokens"),
        (
            changed("weights", np.ones(8, np.float32)),
            r"'weights' needs the dims \('rows', 'positions'\), found shape \(8,\)",
        ),
        (
            changed("tokens", np.full((8, 32), 64, np.int32)),
            "'tokens' has 256 ids outside the vocabulary of 64: the first is 64 at row 0, position 0, the largest 64; "
            "ids go from 0 to 63",
        ),
        (changed("targets", np.full((8, 32), -1, np.int32)), "'targets' has 256 ids outside the vocabulary of 64"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(run, batch, message):
    """Otherwise an array is ignored, or an id looks up another token's row."""
    with pytest.raises(BatchError, match=message):
        run.put(batch)


def test_a_batch_of_the_wrong_number_of_rows_is_refused(run):
    """Otherwise it fails inside jax, without the plan's numbers."""
    with pytest.raises(PlanError, match="6 rows do not divide into data x expert x microbatches = 4 x 1 x 1 = 4 parts"):
        run.put(make_batch("ones", 6, 64))
