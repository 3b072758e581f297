"""Softmax attention and its gradients on one device, block by block: the scores of a whole row never exist.

Forward an online softmax over (query block, key block) pairs, backward recomputed probabilities, as in
FlashAttention-2 (Dao 2023, algorithms 1 and 2), in plain JAX. Pairs of which every score is masked are never visited.

Positions may come in several parts that each are contiguous, such as the two that a device has of a sequence in zigzag
order; a `Walk` says where the blocks of each lie in the row, and which pairs to visit.

Letters: B rows, T query positions, S key positions, H query heads, K key heads, G query heads per key head,
D head dim, N query blocks, M key blocks; within a block T and S count its own positions.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A masked score lies so far below the floor of a row's running maximum that its exponential is exactly 0, even
# where the whole row is masked; both are finite, so that no inf - inf arises, here or where a ring merges parts.
MASKED_SCORE = -1e30
LSE_FLOOR = -5e29

# The scores of one pair should stay in a cache: rows that would make more are taken in turns. With 32 rows on two
# CPU cores that takes 0.6 of the time, and memory does not grow with the number of rows.
MAX_SCORES = 2**19


@dataclass(frozen=True)
class Grid:
    """How one attention is cut into blocks: a value, known before anything is traced.

    Attributes:
      queries, keys: positions at hand, in so many equal parts; no block reaches over the end of a part.
      window: a query sees no key that lies this many positions or more before it; None: no limit.
    """

    queries: int
    keys: int
    block: int
    causal: bool
    scale: float
    window: int | None = None
    query_parts: int = 1
    key_parts: int = 1

    @property
    def query_block(self) -> int:
        return even_block(self.queries // self.query_parts, self.block)

    @property
    def key_block(self) -> int:
        return even_block(self.keys // self.key_parts, self.block)

    def query_starts(self, parts: np.ndarray) -> np.ndarray:
        """Where in the row each query block starts, if its parts start at `parts`."""
        return _block_starts(parts, self.queries // self.query_parts, self.query_block)

    def key_starts(self, parts: np.ndarray) -> np.ndarray:
        return _block_starts(parts, self.keys // self.key_parts, self.key_block)

    def live(self, query_starts: np.ndarray, key_starts: np.ndarray) -> np.ndarray:
        """bool[query blocks, key blocks]: whether some query of the one may see some key of the other."""
        ahead = query_starts[:, None] - key_starts[None, :]
        live = np.ones(ahead.shape, bool)
        if self.causal:
            live &= ahead + self.query_block - 1 >= 0
        if self.window is not None:
            live &= ahead - (self.key_block - 1) < self.window
        return live

    @functools.cached_property
    def whole(self) -> "Walk":
        """The walk over queries and keys that both start at 0 and are in one part."""
        starts = self.query_starts(np.zeros(1, np.int32)), self.key_starts(np.zeros(1, np.int32))
        return Walk(np.argwhere(self.live(*starts)).astype(np.int32))

    def row_turns(self, rows: int, heads: int) -> int:
        """In how many equal turns to take the rows, so that a pair's scores number at most MAX_SCORES."""
        most = max(1, MAX_SCORES // (heads * self.query_block * self.key_block))
        return next(turns for turns in range(1, rows + 1) if rows % turns == 0 and rows // turns <= most)


@dataclass(frozen=True)
class Walk:
    """Which pairs of blocks to visit, int32[pairs, 2] as (query block, key block), and where in the row each block
    starts; None: they follow each other from 0. Arrays may be traced, and differ between devices; what does not depend
    on the device is numpy's.

    `visits`: how many of the pairs to visit, where devices differ in that; None: all.
    """

    pairs: np.ndarray | jax.Array
    query_starts: np.ndarray | jax.Array | None = None
    key_starts: np.ndarray | jax.Array | None = None
    visits: jax.Array | None = None


def _block_starts(parts: np.ndarray, length: int, block: int) -> np.ndarray:
    return (parts[:, None] + np.arange(0, length, block)[None, :]).reshape(-1).astype(np.int32)


def even_block(length: int, block: int) -> int:
    """The size of the equal blocks that cover `length`, at most `block`: 129 is 72 + 57, not 128 + 1."""
    count = -(-length // block)
    return length if count == 1 else min(block, -(-length // count // 8) * 8)


def forward_blocks(grid: Grid, q, k, v, segments, walk: Walk | None = None):
    """Output float32[b, t, H, d] and log-sum-exp float32[b, H, t]; for strategies with a gradient rule of their own.

    q: float[b, t, H, d]; k, v: float[b, s, K, d]; segments: (int32[b, t], int32[b, s]) or None. A query that sees
    no key has output 0 and log-sum-exp `LSE_FLOOR`. All inputs must vary over the same manual axes.
    """
    return _in_turns(grid, functools.partial(_forward, grid, walk or grid.whole), (q, k, v, segments))


def backward_blocks(grid: Grid, q, k, v, segments, lse, delta, d_out, walk: Walk | None = None):
    """Gradients of q, k and v, float32, from lse and delta float32[b, H, t] over ALL keys a query sees.

    delta is sum(out * d_out) over d. The keys may be a part of all: gradients of parts add up.
    """
    run = functools.partial(_backward, grid, walk or grid.whole)
    return _in_turns(grid, run, (q, k, v, segments, lse, delta, d_out))


def merge(out, lse, more_out, more_lse):
    """Attention over two disjoint sets of keys as one over both: float32[b, t, H, d] and float32[b, H, t].

    The larger log-sum-exp is taken out first, so that nothing overflows, and where neither saw a key there is none.
    """
    top = jnp.maximum(lse, more_lse)
    weight, more_weight = jnp.exp(lse - top), jnp.exp(more_lse - top)
    # Both at the floor: two weights of 1 for two outputs of 0.
    total = jnp.where(top > LSE_FLOOR, weight + more_weight, 1.0)
    share, more_share = (jnp.moveaxis(w / total, 1, 2)[..., None] for w in (weight, more_weight))
    return out * share + more_out * more_share, jnp.where(top > LSE_FLOOR, top + jnp.log(total), LSE_FLOOR)


def _in_turns(grid: Grid, run, args):
    rows, _, heads, _ = args[0].shape
    turns = grid.row_turns(rows, heads)
    if turns == 1:
        return run(*args)
    parts = jax.tree.map(lambda x: x.reshape(turns, rows // turns, *x.shape[1:]), args)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), lax.map(lambda part: run(*part), parts))


def _forward(grid: Grid, walk: Walk, q, k, v, segments):
    q_NBKGTD = _query_blocks(q, k.shape[2], grid)
    k_MBKSD, v_MBKSD = _key_blocks(k, grid), _key_blocks(v, grid)
    segment_blocks = _segment_blocks(segments, grid)

    def visit(carry, i, j):
        scores = _scores(grid, walk, q_NBKGTD, k_MBKSD, segment_blocks, i, j)
        acc, top, total = (_at(x, i) for x in carry)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        p_BKGTS = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        seen = _dot("bkgts,bksd->bkgtd", p_BKGTS.astype(v.dtype), _at(v_MBKSD, j))
        new = (acc * fade[..., None] + seen, new_top, total * fade + p_BKGTS.sum(axis=-1))
        return tuple(_put(x, block, i) for x, block in zip(carry, new, strict=True))

    zeros = jnp.zeros_like(q_NBKGTD, jnp.float32)
    row = zeros[..., 0]
    acc, top, total = _walk(walk, visit, (zeros, row + LSE_FLOOR, row))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse_NBKGT = jnp.where(some, top + jnp.log(total), LSE_FLOOR)
    return _from_query_blocks(acc / total[..., None], grid), _from_row_blocks(lse_NBKGT, grid)


def _backward(grid: Grid, walk: Walk, q, k, v, segments, lse, delta, d_out):
    kv_heads = k.shape[2]
    q_NBKGTD, do_NBKGTD = _query_blocks(q, kv_heads, grid), _query_blocks(d_out, kv_heads, grid)
    k_MBKSD, v_MBKSD = _key_blocks(k, grid), _key_blocks(v, grid)
    lse_NBKGT, delta_NBKGT = _row_blocks(lse, kv_heads, grid), _row_blocks(delta, kv_heads, grid)
    segment_blocks = _segment_blocks(segments, grid)

    def visit(carry, i, j):
        dq, dk, dv = carry
        q_BKGTD, do_BKGTD = _at(q_NBKGTD, i), _at(do_NBKGTD, i)
        scores = _scores(grid, walk, q_NBKGTD, k_MBKSD, segment_blocks, i, j)
        p_BKGTS = jnp.exp(scores - _at(lse_NBKGT, i)[..., None])
        dp_BKGTS = _dot("bkgtd,bksd->bkgts", do_BKGTD, _at(v_MBKSD, j))
        ds_BKGTS = p_BKGTS * (dp_BKGTS - _at(delta_NBKGT, i)[..., None]) * grid.scale
        dv = _add(dv, _dot("bkgts,bkgtd->bksd", p_BKGTS.astype(d_out.dtype), do_BKGTD), j)
        dk = _add(dk, _dot("bkgts,bkgtd->bksd", ds_BKGTS.astype(q.dtype), q_BKGTD), j)
        dq = _add(dq, _dot("bkgts,bksd->bkgtd", ds_BKGTS.astype(k.dtype), _at(k_MBKSD, j)), i)
        return dq, dk, dv

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q_NBKGTD, k_MBKSD, v_MBKSD))
    dq, dk, dv = _walk(walk, visit, zeros)
    return _from_query_blocks(dq, grid), _from_key_blocks(dk, grid), _from_key_blocks(dv, grid)


def _walk(walk: Walk, visit, carry):
    if walk.visits is None:
        return lax.scan(lambda carry, pair: (visit(carry, *pair), None), carry, (walk.pairs[:, 0], walk.pairs[:, 1]))[0]
    pairs = jnp.asarray(walk.pairs)
    # Devices differ in how many they visit; nothing in here talks to another one.
    return lax.fori_loop(0, walk.visits, lambda n, carry: visit(carry, pairs[n, 0], pairs[n, 1]), carry)


def _scores(grid: Grid, walk: Walk, q_NBKGTD, k_MBKSD, segment_blocks, i, j):
    """float32[B, K, G, T, S] of block pair (i, j), scaled; `MASKED_SCORE` where a query may not see a key."""
    scores = _dot("bkgtd,bksd->bkgts", _at(q_NBKGTD, i), _at(k_MBKSD, j)) * grid.scale
    part, blocks = grid.keys // grid.key_parts, k_MBKSD.shape[0] // grid.key_parts
    seen_BTS = ((j % blocks) * grid.key_block + jnp.arange(grid.key_block) < part)[None, None, :]
    if grid.causal or grid.window is not None:
        t_T = _start(walk.query_starts, i, grid.query_block) + jnp.arange(grid.query_block)
        s_S = _start(walk.key_starts, j, grid.key_block) + jnp.arange(grid.key_block)
        ahead_TS = t_T[:, None] - s_S[None, :]
        if grid.causal:
            seen_BTS &= (ahead_TS >= 0)[None]
        if grid.window is not None:
            seen_BTS &= (ahead_TS < grid.window)[None]
    if segment_blocks is not None:
        q_NBT, k_MBS = segment_blocks
        seen_BTS &= _at(q_NBT, i)[:, :, None] == _at(k_MBS, j)[:, None, :]
    return jnp.where(seen_BTS[:, None, None], scores, MASKED_SCORE)


def _start(starts, block, size: int):
    return block * size if starts is None else jnp.asarray(starts)[block]


def _dot(spec: str, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _at(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x, block, index):
    return lax.dynamic_update_index_in_dim(x, block, index, 0)


def _add(x, block, index):
    return _put(x, _at(x, index) + block, index)


def _cut(x, axis: int, block: int, parts: int):
    """Splits the positions on `axis` into blocks, the last of each part filled up with zeros, and puts blocks first."""
    length = x.shape[axis] // parts
    count = -(-length // block)
    x = x.reshape(*x.shape[:axis], parts, length, *x.shape[axis + 1 :])
    x = jnp.pad(x, [(0, count * block - length if a == axis + 1 else 0) for a in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], parts * count, block, *x.shape[axis + 2 :]), axis, 0)


def _joined(x, axis: int, length: int, parts: int):
    """The inverse, from `[..., blocks x block, ...]` on `axis`."""
    x = x.reshape(*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    x = lax.slice_in_dim(x, 0, length // parts, axis=axis + 1)
    return x.reshape(*x.shape[:axis], length, *x.shape[axis + 2 :])


def _query_blocks(x_BTHD, kv_heads: int, grid: Grid):
    x_NBTHD = _cut(x_BTHD, 1, grid.query_block, grid.query_parts)
    n, b, t, h, d = x_NBTHD.shape
    return x_NBTHD.reshape(n, b, t, kv_heads, h // kv_heads, d).transpose(0, 1, 3, 4, 2, 5)


def _from_query_blocks(x_NBKGTD, grid: Grid):
    n, b, k, g, t, d = x_NBKGTD.shape
    x_BTHD = x_NBKGTD.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * t, k * g, d)
    return _joined(x_BTHD, 1, grid.queries, grid.query_parts)


def _key_blocks(x_BSKD, grid: Grid):
    return _cut(x_BSKD, 1, grid.key_block, grid.key_parts).transpose(0, 1, 3, 2, 4)


def _from_key_blocks(x_MBKSD, grid: Grid):
    m, b, k, s, d = x_MBKSD.shape
    x_BSKD = x_MBKSD.transpose(1, 0, 3, 2, 4).reshape(b, m * s, k, d)
    return _joined(x_BSKD, 1, grid.keys, grid.key_parts)


def _row_blocks(x_BHT, kv_heads: int, grid: Grid):
    x_NBHT = _cut(x_BHT, 2, grid.query_block, grid.query_parts)
    n, b, h, t = x_NBHT.shape
    return x_NBHT.reshape(n, b, kv_heads, h // kv_heads, t)


def _from_row_blocks(x_NBKGT, grid: Grid):
    n, b, k, g, t = x_NBKGT.shape
    x_BHT = x_NBKGT.transpose(1, 2, 3, 0, 4).reshape(b, k * g, n * t)
    return _joined(x_BHT, 2, grid.queries, grid.query_parts)


def _segment_blocks(segments, grid: Grid):
    if segments is None:
        return None
    queries, keys = segments
    return _cut(queries, 1, grid.query_block, grid.query_parts), _cut(keys, 1, grid.key_block, grid.key_parts)
