"""What cannot be split over `seq` is refused before anything compiles, with the way to mend it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import ModelError, Plan, PlanError, Program, token_shapes
from jaxpar.plan import Hybrid
from jaxpar.testing import run_on_enough_devices
from models.llama import Block, Llama, LlamaConfig
from models.vit import IMAGES, ViTConfig

TINY = LlamaConfig(16, 1, 16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=16)


@pytest.fixture(autouse=True)
def no_compile(monkeypatch):
    def compile(*args, **kwargs):
        raise AssertionError("compiled before it was refused")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


def problem(program: Program, length: int | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        program.validate(None if length is None else token_shapes(8, length), 8)
    (found,) = caught.value.problems
    return found


def tiny(mesh, build=TINY.build, **options) -> Program:
    return Program(build, optax.sgd(0.1), Plan(mesh, **options))


@pytest.mark.parametrize(
    ("options", "length", "multiple", "longer"),
    [
        ({}, 24, 16, 32),
        ({"attention": "allgather"}, 40, 16, 48),
        ({"attention": Hybrid(2)}, 8, 16, 16),
        ({"attention": Hybrid(8)}, 12, 8, 16),
        ({"attention": "ulysses"}, 30, 8, 32),
    ],
    ids=str,
)
def test_a_length_that_does_not_divide_says_which_would(options, length, multiple, longer):
    """Otherwise positions would be dropped, or jax would speak of a reshape."""
    found = problem(tiny("seq=8", **options), length)
    assert f"{length} positions do not divide" in found
    assert f"give a multiple of {multiple}, e.g. {longer}, filled up with weight 0" in found
    tiny("seq=8", **options).validate(token_shapes(8, longer), 8)


def test_groups_of_ulysses_that_do_not_divide_seq_say_which_would():
    """Otherwise a device would be in no group."""
    with pytest.raises(PlanError, match=r"ulysses=3 must divide seq=8; choose one of \[1, 2, 4, 8\]"):
        Plan("seq=8", attention=Hybrid(3))
    with pytest.raises(PlanError, match="ulysses=2 is for groups in a ring; attention='allgather' has none"):
        Plan("seq=8", attention="allgather", ulysses=2)


def test_a_ring_in_stages_that_fill_is_refused():
    """Otherwise some stages would wait for a send that others do not play: forever."""
    options = {"pipeline": "zero_bubble", "microbatches": 4, "fill": True}
    for attention in ("ring", Hybrid(2)):
        with pytest.raises(PlanError, match="choose fill=False, or attention='ulysses' or 'allgather'"):
            Plan("pipe=2,seq=4", attention=attention, **options)
    Plan("pipe=2,seq=4", attention="ulysses", **options)


def test_heads_that_ulysses_and_tensor_cannot_share_say_which_could():
    """Otherwise heads would be read by queries of others: in silence."""
    config = LlamaConfig(16, 1, 16, num_heads=12, num_kv_heads=6, head_dim=4, mlp_dim=16)
    run = run_on_enough_devices(tiny("tensor=2,seq=4", config.build, attention="ulysses"))
    with pytest.raises(PlanError, match=r"12 query and 6 key heads .* 4 x 2; choose ulysses among \[1, 3, 6\]"):
        run.lower(token_shapes(4, 16))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 8), (3, 2), (33, 2)])
@pytest.mark.parametrize("mesh", ["data=1", "seq=2"])
def test_query_heads_that_are_no_multiple_of_key_heads_are_refused(heads, kv_heads, mesh):
    """Otherwise filling up makes them divide, and queries read the wrong keys."""

    class Uneven(Block):
        def __call__(self, x, ctx):
            q, k = (jnp.zeros((*x.shape[:2], n, 4)) for n in (heads, kv_heads))
            return x + jnp.sum(ctx.attend(q, k, k))

    class Model(Llama):
        def __init__(self, config, *, rngs):
            super().__init__(config, rngs=rngs)
            self.blocks = jaxpar.stack(Uneven, 1, config, rngs=rngs)

    run = run_on_enough_devices(tiny(mesh, lambda rngs: Model(TINY, rngs=rngs), attention="ulysses"))
    with pytest.raises(ModelError, match=f"{heads} query heads over {kv_heads} kv heads"):
        run.lower(token_shapes(4, 16))


def test_images_have_no_positions_to_split():
    """Otherwise every device of `seq` would work on the same image, and count it again."""
    config = ViTConfig(8, 4, 10, 1, 16, num_heads=4, mlp_dim=16)
    program = Program(config.build, optax.sgd(0.1), Plan("seq=8"), batch_axes=IMAGES)
    assert problem(program) == (
        "seq=8 splits positions, and no array of the batch has any; use data or tensor in place of seq"
    )


class Convolution(nnx.Module):
    """Over positions, without a look at the neighbours' ones."""

    mixes_positions = True

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jnp.ones((3, 16)))


class Mixing(Block):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.convolution = Convolution(rngs=rngs)


class MixingModel(Llama):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.blocks = jaxpar.stack(Mixing, 1, config, rngs=rngs)


def test_a_layer_that_mixes_positions_is_refused_by_name():
    """Otherwise a convolution would see zeros, or another position of the row, at the end of every part."""
    found = problem(tiny("seq=8", lambda rngs: MixingModel(TINY, rngs=rngs)))
    assert "blocks.convolution (mixes_positions = True) would see only a device's own" in found
    assert "use data or tensor in place of seq" in found
    tiny("data=8", lambda rngs: MixingModel(TINY, rngs=rngs)).validate(devices=8)
