"""What one layer stores between forward and backward under each remat policy, from shapes alone."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxpar.executor.layer import LayerGradient, apply_layer
from jaxpar.model import Context
from jaxpar.parallel.attention import attend_on_tensor_shards
from jaxpar.parallel.expert import Route
from jaxpar.parallel.halo import Halo
from jaxpar.plan import Plan
from jaxpar.structure import inspect_model
from models.llama import LlamaConfig

ROWS, POSITIONS, EMBED, MLP = 2, 16, 32, 72
CONFIG = LlamaConfig(vocab_size=50, num_layers=3, embed_dim=EMBED, num_heads=8, num_kv_heads=4, head_dim=6, mlp_dim=MLP)
X = jax.ShapeDtypeStruct((ROWS, POSITIONS, EMBED), jnp.float32)
FULL = 4 * ROWS * POSITIONS * EMBED
ATTENTION = 4 * ROWS * POSITIONS * 8 * (6 + 1)  # its result, and the log of each softmax's denominator
QKV = 4 * ROWS * POSITIONS * (8 + 2 * 4) * 6
BYTES = {
    "none": 101_632,
    "dots": 38_912,
    "full": FULL,
    "named:attention": FULL + ATTENTION,
    "named:attention,qkv": FULL + ATTENTION + QKV,
    "named:qkv,out": FULL + QKV + 4 * ROWS * POSITIONS * EMBED,
    "named:attention,mlp": FULL + ATTENTION + 4 * ROWS * POSITIONS * MLP,
}


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attend(q, k, v, *, segments, causal, window):
    return attend_on_tensor_shards(q, k, v, segments_q=segments, segments_k=segments, causal=causal, window=window)


CONTEXT = Context(
    rows=int32(ROWS),
    index=int32(POSITIONS),
    positions=int32(ROWS, POSITIONS),
    segments=int32(ROWS, POSITIONS),
    key=jax.eval_shape(lambda: jax.random.key(0)),
    depth=int32(),
    train=True,
    attention=attend,
    neighbours=Halo(),
    routing=Route(),
    rules=Plan().rules,
    sites=itertools.count(),
)


@pytest.fixture(scope="module")
def layer():
    structure = inspect_model(CONFIG.build)
    (stack,) = structure.stacks
    weights = {path: jax.ShapeDtypeStruct(i.dims, i.dtype) for path, i in structure.stack_params(stack).items()}
    return partial(apply_layer, structure, stack), weights


def saved(layer, remat):
    run, weights = layer
    gradient = LayerGradient(run, remat, Plan(remat=remat).saved_names)
    return jax.eval_shape(gradient.forward, weights, X, CONTEXT)[2]


@pytest.mark.parametrize("remat", BYTES)
def test_a_layer_stores_just_so_many_bytes(layer, remat):
    """Otherwise memory grows by layers x microbatches without anybody noticing, and the planner's prices are off."""
    assert sum(a.size * a.dtype.itemsize for a in saved(layer, remat)) == BYTES[remat]


@pytest.mark.parametrize("remat", BYTES)
def test_a_layer_stores_activations_and_neither_weights_nor_tables(layer, remat):
    """Otherwise each microbatch would keep a copy of weights, positions or segments that are there anyway."""
    of_tokens = [a for a in saved(layer, remat) if a.shape[:1] in ((ROWS,), (ROWS * POSITIONS,))]
    small = [a for a in saved(layer, remat) if a.shape[:1] not in ((ROWS,), (ROWS * POSITIONS,))]
    # Scales of the two norms in the rank of activations, constants of the rotary frequencies.
    assert all(a.size <= EMBED for a in small), small
    assert not [a for a in of_tokens if a.dtype != jnp.float32]


def test_full_remat_stores_the_input_alone(layer):
    """Otherwise the cheapest policy would not be the cheapest possible."""
    assert saved(layer, "full") == [X]
