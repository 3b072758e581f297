"""Keys and values of the positions so far, kept behind `ctx.attend`: a model computes a new position alone, and knows
nothing of it.

Each object serves one call of `model.logits` and is gone with the trace; the arrays go on in `cache`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jaxpar.errors import ModelError
from jaxpar.parallel.attention import blockwise_attention

# Keys and values of each call of `ctx.attend`, in the order of the calls: float[b, window, kv, d].
Cache = tuple[tuple[Array, Array], ...]


class Remember:
    """Attention over whole rows that keeps the keys and values of every call."""

    def __init__(self) -> None:
        self.cache: Cache = ()

    def __call__(
        self, q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool, window: int | None = None
    ) -> Array:
        _check_decoder(q, k, causal)
        self.cache += ((k, v),)
        return blockwise_attention(q, k, v, segments_q=segments, segments_k=segments, causal=True, window=window)


class Recall:
    """Attention of position `at`, which is all there is of q, k and v, over those up to it."""

    def __init__(self, cache: Sequence[tuple[Array, Array]], at: Array) -> None:
        self.cache: Cache = ()
        self._before, self._at = iter(cache), at

    def __call__(
        self, q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool, window: int | None = None
    ) -> Array:
        _check_decoder(q, k, causal)
        before = next(self._before)
        keys, values = (
            lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self._at, axis=1)
            for old, new in zip(before, (k, v), strict=True)
        )
        self.cache += ((keys, values),)
        # One segment for all that is seen, another for the rest.
        ahead = self._at - jnp.arange(keys.shape[1])
        near = (ahead >= 0) & (ahead < (keys.shape[1] if window is None else window))
        seen = jnp.broadcast_to(near, keys.shape[:2]).astype(jnp.int32)
        mine = jnp.ones(q.shape[:2], jnp.int32)
        return blockwise_attention(q, keys, values, segments_q=mine, segments_k=seen, causal=False)


def _check_decoder(q: Array, k: Array, causal: bool) -> None:
    if not causal or q.shape[1] != k.shape[1]:
        raise ModelError(
            f"only a decoder continues text token by token: every layer attends to earlier positions of its own row; "
            f"found attend(..., causal={causal}) with {q.shape[1]} queries and {k.shape[1]} keys"
        )
