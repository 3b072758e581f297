"""Names that are found for a model without any: no more is moved than by hand, and the numbers are one device's."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import make_batch
from jaxpar import Plan, PlanError, Program
from jaxpar.estimate.compile import report
from jaxpar.model import Context
from jaxpar.structure import inspect_model, renamed
from jaxpar.testing import compare, one_device, run_loss_and_grads, run_on_enough_devices
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig
from models.vit import IMAGES, ViTConfig
from tests.parity import test_user_model as user

SIZES: dict = dict(
    vocab_size=61, num_layers=2, embed_dim=20, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=28, qk_norm=True
)
MODELS = {
    "Llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),  # fewer kv heads than devices
    "GPT": GPTConfig(61, 2, 20, 4, 28, 16),
    "ViT": ViTConfig(image_size=12, patch_size=4, num_classes=7, num_layers=2, embed_dim=20, num_heads=4, mlp_dim=28),
    "MoE": MoEConfig(**SIZES, num_experts=3, moe_mlp_dim=12, num_shared_experts=1, num_dense_layers=1),
}
PLAN = Plan("data=2,tensor=4")


def batch(name: str) -> dict[str, np.ndarray]:
    if name != "ViT":
        return make_batch("uneven", 4, 61, 16)
    rng = np.random.default_rng(0)
    return {"image": rng.normal(size=(4, 12, 12, 3)).astype(np.float32), "label": np.arange(4, dtype=np.int32)}


def axes(name: str):
    return IMAGES if name == "ViT" else jaxpar.TOKENS


def bare(build):
    """The model of somebody who has never heard of names."""
    params = inspect_model(build).params
    return renamed(build, {path: (None,) * len(info.dims) for path, info in params.items()})


def shapes(data: dict[str, np.ndarray]):
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in data.items()}


def program(build, name: str) -> Program:
    return Program(build, optax.sgd(0.1), PLAN, axes(name))


def sent(run, name: str) -> int:
    step = report(run.lower(shapes(batch(name))), run.mesh)
    return sum(c.executions * c.bytes for c in step.collectives if any(a.startswith("tensor") for a in c.axes))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_moves_no_more_than_what_was_written_by_hand(name, monkeypatch):
    """Otherwise nobody would leave it to a program: a gather in every layer, or an expert on every device.

    The model without names has no `ctx.constrain` either.
    """
    build = MODELS[name].build
    by_hand = sent(run_on_enough_devices(program(build, name)), name)
    monkeypatch.setattr(Context, "constrain", lambda self, x, *names: x)
    found = jaxpar.auto_annotate(bare(build), shapes(batch(name)), PLAN.mesh)
    run = run_on_enough_devices(program(found.build, name))
    assert 0 < sent(run, name) <= by_hand
    # As much is split as by hand.
    hand = inspect_model(build).params
    split = {path for path, info in hand.items() if "tensor" in map(PLAN.rules.axis, info.names)}
    uneven = {path for path in split if ".k." in path or ".v." in path} if name in ("Llama", "MoE") else set()
    assert {c.path for c in found.choices if c.split} >= split - uneven

    differences = compare(
        *run_loss_and_grads(run, batch(name)),
        *run_loss_and_grads(run_on_enough_devices(one_device(program(build, name))), batch(name)),
    )
    assert not differences, "\n".join(map(str, differences))


def test_a_users_model_of_flax_layers_is_split_and_equals_one_device():
    """Otherwise only models like ours would be understood: `nnx.Linear`, biases, a norm, no context."""
    build, data = bare(user.Patches), user.images()
    found = jaxpar.auto_annotate(build, shapes(data), "data=2,tensor=4")
    assert found.names["blocks.up.kernel"] == (None, "tensor") and found.names["blocks.up.bias"] == ("tensor",)
    assert found.names["blocks.down.kernel"] == ("tensor", None) and found.names["blocks.down.bias"] == (None,)
    make = partial(Program, optimizer=optax.sgd(0.1), plan=PLAN, batch_axes=user.IMAGES)
    alone = run_loss_and_grads(run_on_enough_devices(one_device(make(build))), data)
    assert not compare(*run_loss_and_grads(run_on_enough_devices(make(found.build)), data), *alone)


def test_names_that_are_there_are_kept():
    """Otherwise a person could not decide a part of it."""
    names = {"blocks.mlp.gate.kernel": ("tensor", None)}
    build = renamed(bare(MODELS["GPT"].build), {"blocks.mlp.up.kernel": (None, None), "blocks.attention.q.kernel": (
        None, None, "tensor")})  # fmt: skip
    with pytest.raises(jaxpar.errors.ModelError, match=r"names of blocks\.attention\.q\.kernel fit no layout"):
        jaxpar.auto_annotate(build, jaxpar.token_shapes(4, 16), "tensor=2")
    kept = renamed(bare(MODELS["Llama"].build), names | {"embedding": ("vocab", "embed")})
    with pytest.raises(jaxpar.errors.ModelError, match="fit no layout"):
        jaxpar.auto_annotate(kept, jaxpar.token_shapes(4, 16), "tensor=2")
    fine = renamed(bare(MODELS["Llama"].build), {"blocks.mlp.down.kernel": ("mlp", "embed")})
    assert jaxpar.auto_annotate(fine, jaxpar.token_shapes(4, 16), "tensor=2").names["blocks.mlp.down.kernel"] == (
        "mlp",
        "embed",
    )


def test_the_explanation_says_what_each_choice_costs():
    """Otherwise a person could not tell a good layout from a lucky one."""
    text = str(jaxpar.auto_annotate(bare(MODELS["MoE"].build), jaxpar.token_shapes(4, 16), "tensor=4"))
    assert "blocks.experts.down" in text and "experts, tensor, -" in text and "summed once a layer" in text
    assert "whole: what it makes would have to be gathered" in text  # the router
    assert "otherwise whole: +" in text and "parameters are split; tensor=4 sends" in text


def test_the_bytes_are_those_of_four_sums_a_layer():
    """Otherwise two layouts would be compared by numbers that mean nothing."""
    found = jaxpar.auto_annotate(bare(MODELS["GPT"].build), jaxpar.token_shapes(4, 16), "data=2,tensor=4")
    activation = 2 * 16 * 20 * 4
    assert found.bytes == 2 * 4 * activation * 2 * 3 / 4


def test_what_cannot_be_split_is_refused_with_its_sizes():
    """Otherwise a mesh of 4 would run with every device doing all of the work."""
    with pytest.raises(PlanError, match="tensor=1: there is nothing to split"):
        jaxpar.auto_annotate(MODELS["GPT"].build, jaxpar.token_shapes(4, 16), "data=8")
    with pytest.raises(PlanError, match=r"can be split over tensor=11.*blocks\.up\.kernel \[20, 24\]: whole: no dim"):
        jaxpar.auto_annotate(bare(user.Patches), shapes(user.images()), "tensor=11")


class Fused(nnx.Module):
    """One matrix for queries, keys and values, cut into three: attention written by its user."""

    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.heads = heads

    def __call__(self, x, ctx):
        q, k, v = jax.numpy.split(self.qkv(x).reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
        scores = jax.nn.softmax(jax.numpy.einsum("bthd,bshd->bhts", q, k), axis=-1)
        return x + self.out(jax.numpy.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape))


def test_attention_that_a_user_wrote_is_split_by_heads():
    """Otherwise only `ctx.attend` would be understood: heads go through a reshape, a split and a softmax."""

    class Model(user.Patches):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.blocks = jaxpar.stack(Fused, 2, dim=20, heads=4, rngs=rngs)

    names = jaxpar.auto_annotate(bare(Model), shapes(user.images()), "tensor=4").names
    assert names["blocks.qkv.kernel"] == (None, "tensor") and names["blocks.out.kernel"] == ("tensor", None)
