"""Exact attention on the rows and heads of one device: the public functions, and the gradient they share.

In the partly manual region mesh axis `tensor` is XLA's, but these loops are not for XLA to split: a nested region
over `tensor` alone gives every device its own heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxpar.errors import ModelError
from jaxpar.parallel.attention_blocks import Grid, backward_blocks, forward_blocks

DEFAULT_BLOCK = 128
HEADS, HEAD_ROWS = P(None, None, "tensor"), P(None, "tensor")  # of float[b, t, H, d] and float32[b, H, t]


def blockwise_attention(
    q: Float[Array, "b t H d"],
    k: Float[Array, "b s K d"],
    v: Float[Array, "b s K d"],
    *,
    segments_q: Int[Array, "b t"] | None = None,
    segments_k: Int[Array, "b s"] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    block: int = DEFAULT_BLOCK,
) -> Float[Array, "b t H d"]:
    """Softmax attention of every query over the keys it may see; memory grows with `block`, never with t * s.

    H is a multiple of K: query head h reads key head h // (H // K). segments_k defaults to segments_q: a query
    sees only keys of its own segment, so documents packed in a row stay apart, and padding (segment 0) is one
    more document. causal: only keys whose index in the row is not beyond the query's. window: only keys that lie
    less than this many positions before the query. scale: factor of the
    scores, default d ** -0.5. A query that sees no key gives zeros, and zero gradients. Sums are in float32, the
    result has q's dtype.
    """
    options = dict(segments_q=segments_q, segments_k=segments_k, causal=causal, window=window, scale=scale, block=block)
    return attention_with_lse(q, k, v, **options)[0]


def attention_with_lse(q, k, v, **options) -> tuple[Float[Array, "b t H d"], Float[Array, "b H t"]]:
    """`blockwise_attention`, and the log of each softmax's denominator in float32 (`LSE_FLOOR` with no key).

    Both results are differentiable, so partial results over disjoint keys can be merged by their lse.
    """
    return _attend(q, k, v, tensor=1, **options)


def attend_on_tensor_shards(q, k, v, **options) -> Float[Array, "b t H d"]:
    """`blockwise_attention` with its heads split over mesh axis `tensor`, if the mesh in scope has it automatic.

    Query heads must divide by the axis. Key heads are split if they divide too; if instead the axis divides by
    them, every device takes the one key head that its query heads read, and the gradients of k and v are summed
    over `tensor`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return _attend(q, k, v, tensor=mesh.shape["tensor"] if "tensor" in mesh.auto_axes else 1, **options)[0]


def vary_alike(tree):
    """Casts every leaf to vary over the same manual axes: carries of the scans mix them and must keep their type.

    Outside of the custom rule, so that the transpose of the cast sums the gradient of what varied over less.
    """
    union = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))

    def cast(x):
        missing = tuple(sorted(union - jax.typeof(x).mat.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _attend(
    q, k, v, *, tensor, segments_q=None, segments_k=None, causal=True, window=None, scale=None, block=DEFAULT_BLOCK
):
    heads, kv_heads = q.shape[2], k.shape[2]
    assert heads % kv_heads == 0 and heads % tensor == 0, (heads, kv_heads, tensor)
    assert kv_heads % tensor == 0 or tensor % kv_heads == 0, (kv_heads, tensor)
    grid = Grid(q.shape[1], k.shape[1], block, causal, q.shape[-1] ** -0.5 if scale is None else float(scale), window)
    segments = None if segments_q is None else (segments_q, segments_q if segments_k is None else segments_k)
    if kv_heads % tensor:
        k, v = (_one_head_each(x, tensor) for x in (k, v))
    return _attention(grid, tensor, *vary_alike((q, k, v, segments)))


def _one_head_each(x_BSKD, tensor: int):
    """Repeats key heads so that every device holds the one its query heads read, and none holds more.

    In float32 and back: the values are the same, and gradients of a shared head are summed over devices in float32.
    """
    repeated = jnp.repeat(x_BSKD.astype(jnp.float32), tensor // x_BSKD.shape[2], axis=2)
    return repeated.astype(x_BSKD.dtype)


# The custom rule stands outside of the nested region, so that nothing ever differentiates through one: its
# residuals are the arrays themselves, and no derivative has to be split between known and unknown parts.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(grid: Grid, tensor: int, q, k, v, segments):
    return _attention_fwd(grid, tensor, q, k, v, segments)[0]


def _attention_fwd(grid: Grid, tensor: int, q, k, v, segments):
    def local(q, k, v, segments):
        out, lse = forward_blocks(grid, q, k, v, segments)
        return out.astype(q.dtype), lse

    args = (q, k, v, segments)
    out, lse = on_own_heads(local, tensor, (HEADS, HEADS, HEADS, P()), (HEADS, HEAD_ROWS))(*args)
    # With both saved by name, the backward does not run the forward again.
    out, lse = (checkpoint_name(x, "attention") for x in (out, lse))
    return (out, lse), (*args, out, lse)


def _attention_bwd(grid: Grid, tensor: int, residuals, cotangents):
    def local(q, k, v, segments, out, lse, d_out, d_lse):
        # d score = p * (d p - delta), and the lse's own gradient is p * d_lse: it joins delta.
        delta = jnp.einsum("bthd,bthd->bht", out, d_out, preferred_element_type=jnp.float32) - d_lse
        gradients = backward_blocks(grid, q, k, v, segments, lse, delta, d_out)
        return tuple(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))

    specs = (HEADS, HEADS, HEADS, P(), HEADS, HEAD_ROWS, HEADS, HEAD_ROWS)
    return *on_own_heads(local, tensor, specs, (HEADS, HEADS, HEADS))(*residuals, *cotangents), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def on_own_heads(local, tensor: int, in_specs, out_specs):
    """`local` on each device's heads, as one equation that partial evaluation never splits.

    A scan over layers, when differentiated, hoists what its body computes from constants, out of a nested region
    too; what it takes from there may vary over `data`, and jax then binds `data` a second time and cannot lower
    it. A call with its own batching rule is staged whole.
    """
    if tensor == 1:
        return local
    mesh = jax.sharding.get_abstract_mesh()
    nested = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"tensor"})
    whole = jax.custom_batching.custom_vmap(nested)

    @whole.def_vmap
    def refuse(axis_size, in_batched, *args):
        raise ModelError("ctx.attend under vmap cannot split heads over `tensor`; give it the rows as its first dim")

    return whole
