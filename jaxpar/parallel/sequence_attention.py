"""Exact attention over positions split over `seq`: a ring, Ulysses, gathered keys, or Ulysses inside a ring.

One gradient rule for all of them: saved is what lies in the layout of heads, so that each array is traded once.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxpar.parallel.attention import DEFAULT_BLOCK, HEAD_ROWS, HEADS, on_own_heads, vary_alike
from jaxpar.parallel.attention_blocks import Grid, backward_blocks, forward_blocks
from jaxpar.parallel.gathered import Gathered
from jaxpar.parallel.ring import Ring
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.parallel.ulysses import Ulysses, share_heads


def attend_over_sequence(
    q: Float[Array, "b t H d"],
    k: Float[Array, "b t K d"],
    v: Float[Array, "b t K d"],
    *,
    layout: SequenceLayout,
    tensor: int,
    segments: Int[Array, "b t"] | None,
    causal: bool = True,
    window: int | None = None,
    block: int = DEFAULT_BLOCK,
) -> Float[Array, "b t H d"]:
    """`blockwise_attention` of whole rows, of which each device of `seq` holds `t` positions in `layout`'s order.

    Heads are split over `tensor` as in `attend_on_tensor_shards`. Raises `PlanError` for heads that Ulysses cannot
    split.
    """
    scale = q.shape[-1] ** -0.5
    if layout.members > 1 or k.shape[2] % tensor:
        q, k, v, heads = share_heads(q, k, v, layout.members, tensor)
    else:
        heads = q.shape[2]
    group = q.shape[1] * layout.members
    everything = group * layout.groups if layout.gathers else group
    key_parts = layout.parts * (layout.groups if layout.gathers else 1)
    grid = Grid(group, everything, block, causal, scale, window, layout.parts, key_parts)
    out = _attention(_Options(layout, grid, tensor), *vary_alike((q, k, v, segments)))
    return out[:, :, :heads]


@dataclass(frozen=True)
class _Options:
    layout: SequenceLayout
    grid: Grid
    tensor: int

    def forward(self, q, k, v, segments):
        if self.layout.groups == 1:
            return forward_blocks(self.grid, q, k, v, segments)
        return self._strategy.forward(q, k, v, segments)

    def backward(self, q, k, v, segments, lse, delta, d_out):
        if self.layout.groups == 1:
            return backward_blocks(self.grid, q, k, v, segments, lse, delta, d_out)
        return self._strategy.backward(q, k, v, segments, lse, delta, d_out)

    @property
    def _strategy(self) -> Ring | Gathered:
        return (Gathered if self.layout.gathers else Ring)(self.layout, self.grid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, q, k, v, segments):
    return _attention_fwd(options, q, k, v, segments)[0]


def _attention_fwd(options: _Options, q, k, v, segments):
    ulysses = Ulysses(options.layout)

    def local(q, k, v, segments):
        q, k, v = (ulysses.to_heads(x) for x in (q, k, v))
        segments = ulysses.segments(segments)
        out, lse = options.forward(q, k, v, None if segments is None else (segments, segments))
        out = out.astype(q.dtype)
        return ulysses.to_positions(out), q, k, v, segments, out, lse

    in_specs, out_specs = (HEADS, HEADS, HEADS, P()), (HEADS, HEADS, HEADS, HEADS, P(), HEADS, HEAD_ROWS)
    result, *saved, out, lse = on_own_heads(local, options.tensor, in_specs, out_specs)(q, k, v, segments)
    # With these saved by name, the backward does not run the forward again.
    result, out, lse = (checkpoint_name(x, "attention") for x in (result, out, lse))
    return result, (*saved, out, lse)


def _attention_bwd(options: _Options, saved, d_result):
    ulysses = Ulysses(options.layout)

    def local(q, k, v, segments, out, lse, d_result):
        d_out = ulysses.to_heads(d_result)
        delta = jnp.einsum("bthd,bthd->bht", out, d_out, preferred_element_type=jnp.float32)
        pair = None if segments is None else (segments, segments)
        gradients = options.backward(q, k, v, pair, lse, delta, d_out)
        return tuple(ulysses.to_positions(g.astype(x.dtype)) for g, x in zip(gradients, (q, k, v), strict=True))

    in_specs = (HEADS, HEADS, HEADS, P(), HEADS, HEAD_ROWS, HEADS)
    return *on_own_heads(local, options.tensor, in_specs, (HEADS, HEADS, HEADS))(*saved, d_result), None


_attention.defvjp(_attention_fwd, _attention_bwd)
