"""Matmuls of weights in float8, one by one: their numbers, which they are, and what they keep."""

import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Plan, PlanError, Program, token_shapes
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import compiler_options, topology_devices
from jaxpar.executor.float8 import in_float8
from jaxpar.executor.layer import LayerGradient, apply_layer
from jaxpar.structure import inspect_model
from models.llama import LlamaConfig
from tests.executor.test_saved_bytes import CONFIG, CONTEXT

ROWS, IN, OUT = 6, 32, 24
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def draw(seed, *shape):
    """Numbers whose rows differ in size by up to a thousand."""
    sizes = 10.0 ** jax.random.uniform(jax.random.key(seed), (shape[0], 1), minval=-2, maxval=1)
    return (jax.random.normal(jax.random.key(seed + 1), shape) * sizes).astype(jnp.bfloat16)


X, W, DY = draw(0, ROWS, IN), draw(2, IN, OUT), draw(4, ROWS, OUT)


def run(layer, weights, x, ctx=None):
    return in_float8(layer, "blocks")({"w": weights}, x, ctx)


def matmul(weights, x, ctx):
    return x @ weights["w"]


def float8(x, dtype, axis):
    """`x` as float8 holds it: values, and in bfloat16 a scale for each line along `axis`."""
    scale = jnp.abs(x).max(axis, keepdims=True) / float(jnp.finfo(dtype).max)
    return np.asarray((x / scale).astype(dtype), np.float32), scale


def rounded(x, dtype, axis):
    values, scale = float8(x, dtype, axis)
    return values * np.asarray(scale, np.float32)


def near(found, expected):
    """Within the rounding of the result and of the scales, which are bfloat16."""
    found = np.asarray(found, np.float32)
    return np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()


def test_the_result_is_that_of_operands_rounded_to_float8():
    """Otherwise the scales would be wrong, or nothing would be in float8 at all."""
    expected = rounded(X, E4M3, 1) @ rounded(W, E4M3, 0)
    found = np.asarray(jax.jit(partial(run, matmul))(W, X), np.float32)
    exact = np.asarray(X, np.float32) @ np.asarray(W, np.float32)
    error = np.abs(found - expected) / np.abs(expected).max(1, keepdims=True)
    assert error.max() <= 0.01 < (np.abs(found - exact) / np.abs(exact).max(1, keepdims=True)).max()


def test_gradients_are_those_of_rounded_operands():
    """Otherwise the backward would belong to another function, or a weight's gradient would lose bits for nothing."""
    dw, dx = jax.vjp(partial(run, matmul), W, X)[1](DY)
    assert near(dw, rounded(X, E4M3, 1).T @ np.asarray(DY, np.float32))
    w, scale = float8(W, E4M3, 0)
    assert near(dx, rounded(DY * scale, E5M2, 1) @ w.T)


def test_no_row_depends_on_another():
    """Otherwise numbers would depend on how many rows a device or a microbatch has, and not on the batch alone."""
    small = int(jnp.argmin(jnp.abs(X).max(1)))  # a scale of all rows would leave little of it
    x, dy = X[small : small + 1], DY[small : small + 1]
    assert near(run(matmul, W, x), np.asarray(run(matmul, W, X)[small : small + 1], np.float32))
    of_all, of_one = (jax.vjp(lambda x: run(matmul, W, x), x)[1](dy)[0] for x, dy in ((X, DY), (x, dy)))
    assert near(of_one, np.asarray(of_all[small : small + 1], np.float32))


def test_a_scale_is_the_maximum_of_the_whole_array():
    """Otherwise each shard over `tensor` would round by a scale of its own, and another mesh be another model."""
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    # The last three shards are so small beside the first that its scale leaves them two bits.
    x = X * jnp.repeat(jnp.array([1, 2**-16, 2**-16, 2**-16], X.dtype), IN // 4)[None]
    each = jnp.repeat(jnp.eye(4, dtype=X.dtype), IN // 4, axis=0) * W[:, :4]  # column i: of shard i alone
    layout = [NamedSharding(mesh, P("tensor", None)), NamedSharding(mesh, P(None, "tensor"))]
    found = jax.jit(partial(run, matmul), in_shardings=layout)(each, x)
    assert near(found[:, 1:], (rounded(x, E4M3, 1) @ rounded(each, E4M3, 0))[:, 1:])
    alone = rounded(x[:, IN // 4 :], E4M3, 1) @ rounded(each[IN // 4 :], E4M3, 0)
    assert not near(found[:, 1:], alone[:, 1:])


def test_a_weight_on_the_left_is_a_weight_on_the_right():
    """Otherwise einsum, which may swap operands, would change which gradient is rounded."""
    left = jax.vjp(partial(run, lambda w, x, ctx: (w["w"].T @ x.T).T), W, X)
    right = jax.vjp(partial(run, matmul), W, X)
    assert jnp.array_equal(left[0], right[0])
    assert all(jnp.array_equal(a, b) for a, b in zip(left[1](DY), right[1](DY), strict=True))


def test_batched_weights_keep_their_batch_in_front():
    """Otherwise experts' weights, multiplied from the left, would come back with mixed dims."""
    x, w = X.reshape(2, 3, IN), jnp.stack([W, 2 * W])
    left = run(lambda w, x, ctx: jnp.einsum("edf,enf->end", w["w"].mT.mT, x @ w["w"]), w, x)
    right = run(lambda w, x, ctx: jnp.einsum("enf,edf->end", x @ w["w"], w["w"]), w, x)
    assert left.shape == (2, 3, IN) and jnp.array_equal(left, right)


def float8_matmuls(layer, weights, x):
    return str(jax.make_jaxpr(partial(run, layer))(weights, x)).count("f8_e4m3fn[")


def test_only_matmuls_of_weights_are_in_float8():
    """Otherwise attention's scores, or a router's, would lose bits that they need."""

    def layer(weights, x, ctx):
        scores = x @ x.T
        router = jnp.dot(x, weights["w"], preferred_element_type=jnp.float32)
        return scores @ x + router.sum().astype(x.dtype), jax.nn.silu(x @ (2 * weights["w"].astype(x.dtype)))

    assert float8_matmuls(layer, W, X) == float8_matmuls(matmul, W, X) > 0


def test_a_layer_without_such_a_matmul_is_an_error():
    """Otherwise a plan would promise float8 and nothing would be in it."""
    with pytest.raises(PlanError, match="precision='fp8': no layer of 'blocks' multiplies by a weight"):
        run(lambda weights, x, ctx: x @ x.T, W, X)


def test_what_was_traced_before_in_bfloat16_is_in_float8_now():
    """Otherwise jit would hand out the matmul that it traced for another plan, in silence."""
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(lambda w, x: matmul({"w": w}, x, None))(W, X))
    assert float8_matmuls(matmul, W, X)
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(lambda w, x: matmul({"w": w}, x, None))(W, X))


ATTENTION = 2 * 2 * 16 * 8 * 6  # its result in bfloat16, which `named` keeps twice here


@pytest.mark.parametrize(("remat", "more"), [("none", 0), ("dots", 0), ("full", 0), ("named:attention,mlp", ATTENTION)])
def test_a_layer_stores_what_it_stores_in_bfloat16(remat, more):
    """Otherwise every layer would keep a rounded copy of its gathered weights, which ZeRO 3 has just got rid of."""
    structure = inspect_model(CONFIG.build)
    (stack,) = structure.stacks
    plain = partial(apply_layer, structure, stack)
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = {path: half(info.dims) for path, info in structure.stack_params(stack).items()}
    stored = []
    for layer in (plain, in_float8(plain, stack.name)):
        gradient = LayerGradient(layer, remat, Plan(remat=remat).saved_names)
        saved = jax.eval_shape(gradient.forward, weights, half((2, 16, CONFIG.embed_dim)), CONTEXT)[2]
        stored.append(sum(a.size * a.dtype.itemsize for a in saved))
    assert stored[1] <= 1.01 * stored[0] + more


def test_a_missing_library_is_named_before_anything_compiles(monkeypatch):
    """Otherwise a run would start and fail in the trace of its first step, with an import error."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "qwix" else find(name, *a))
    program = Program(CONFIG.build, optax.sgd(0.1), Plan("data=1", precision="fp8"))
    with pytest.raises(PlanError, match=r"qwix, which is not installed: pip install 'jaxpar\[fp8\]'"):
        program.validate(devices=1)


def test_the_h100_program_multiplies_float8():
    """Otherwise the numbers would be rounded to float8 and multiplied in bfloat16, at bfloat16's speed."""
    config = LlamaConfig(64, num_layers=2, embed_dim=128, num_heads=2, num_kv_heads=2, head_dim=64, mlp_dim=256)
    run = Program(config.build, optax.sgd(0.1), Plan("data=1", precision="fp8")).on(
        topology_devices(Cluster.parse("1x1xh100")), 1
    )
    lowered = run.lower(token_shapes(2, 128))
    text = lowered.compile(compiler_options=compiler_options("gpu")).as_text()
    kernels = re.findall(r"^%\S*gemm_fusion\S* \(([^)]*)\)", text, re.M)
    forward = [k for k in kernels if "f8e4m3fn" in k and "f8e5m2" not in k and "bf16" not in k]
    backward = [k for k in kernels if "f8e4m3fn" in k and "f8e5m2" in k and "bf16" not in k]
    # XLA puts q, k and v into one matmul, and gate and up; their gradients come from matmuls of their own.
    assert len(forward) >= 4 and len(backward) == 7, kernels
