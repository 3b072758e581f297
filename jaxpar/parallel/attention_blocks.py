"""Softmax attention and its gradients on one device, block by block: the scores of a whole row never exist.

Forward an online softmax over (query block, key block) pairs, backward recomputed probabilities, as in
FlashAttention-2 (Dao 2023, algorithms 1 and 2), in plain JAX. Pairs above the causal diagonal are never visited.

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
    """How one attention is cut into blocks: a value, known before anything is traced."""

    queries: int
    keys: int
    block: int
    causal: bool
    scale: float

    @property
    def query_block(self) -> int:
        return even_block(self.queries, self.block)

    @property
    def key_block(self) -> int:
        return even_block(self.keys, self.block)

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """int32[pairs, 2]: the query and key blocks to visit; where causal, none above the diagonal."""
        rows, columns = -(-self.queries // self.query_block), -(-self.keys // self.key_block)
        last_query = (np.arange(rows) + 1) * self.query_block - 1
        first_key = np.arange(columns) * self.key_block
        live = (last_query[:, None] >= first_key[None, :]) | (not self.causal)
        return np.argwhere(live).astype(np.int32)

    def row_turns(self, rows: int, heads: int) -> int:
        """In how many equal turns to take the rows, so that a pair's scores number at most MAX_SCORES."""
        most = max(1, MAX_SCORES // (heads * self.query_block * self.key_block))
        return next(turns for turns in range(1, rows + 1) if rows % turns == 0 and rows // turns <= most)


def even_block(length: int, block: int) -> int:
    """The size of the equal blocks that cover `length`, at most `block`: 129 is 72 + 57, not 128 + 1."""
    count = -(-length // block)
    return length if count == 1 else min(block, -(-length // count // 8) * 8)


def forward_blocks(grid: Grid, q, k, v, segments):
    """Output float32[b, t, H, d] and log-sum-exp float32[b, H, t]; for strategies with a gradient rule of their own.

    q: float[b, t, H, d]; k, v: float[b, s, K, d]; segments: (int32[b, t], int32[b, s]) or None. A query that sees
    no key has output 0 and log-sum-exp `LSE_FLOOR`. All inputs must vary over the same manual axes.
    """
    return _in_turns(grid, functools.partial(_forward, grid), (q, k, v, segments))


def backward_blocks(grid: Grid, q, k, v, segments, lse, delta, d_out):
    """Gradients of q, k and v, float32, from lse and delta float32[b, H, t] over ALL keys a query sees.

    delta is sum(out * d_out) over d. The keys may be a part of all: gradients of parts add up.
    """
    return _in_turns(grid, functools.partial(_backward, grid), (q, k, v, segments, lse, delta, d_out))


def _in_turns(grid: Grid, run, args):
    rows, _, heads, _ = args[0].shape
    turns = grid.row_turns(rows, heads)
    if turns == 1:
        return run(*args)
    parts = jax.tree.map(lambda x: x.reshape(turns, rows // turns, *x.shape[1:]), args)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), lax.map(lambda part: run(*part), parts))


def _forward(grid: Grid, q, k, v, segments):
    q_NBKGTD = _query_blocks(q, k.shape[2], grid)
    k_MBKSD, v_MBKSD = _key_blocks(k, grid), _key_blocks(v, grid)
    segment_blocks = _segment_blocks(segments, grid)

    def visit(carry, pair):
        i, j = pair
        scores = _scores(grid, q_NBKGTD, k_MBKSD, segment_blocks, i, j)
        acc, top, total = (_at(x, i) for x in carry)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        p_BKGTS = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        seen = _dot("bkgts,bksd->bkgtd", p_BKGTS.astype(v.dtype), _at(v_MBKSD, j))
        new = (acc * fade[..., None] + seen, new_top, total * fade + p_BKGTS.sum(axis=-1))
        return tuple(_put(x, block, i) for x, block in zip(carry, new, strict=True)), None

    zeros = jnp.zeros_like(q_NBKGTD, jnp.float32)
    row = zeros[..., 0]
    (acc, top, total), _ = lax.scan(visit, (zeros, row + LSE_FLOOR, row), tuple(grid.pairs.T))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse_NBKGT = jnp.where(some, top + jnp.log(total), LSE_FLOOR)
    return _from_query_blocks(acc / total[..., None], grid), _from_row_blocks(lse_NBKGT, grid)


def _backward(grid: Grid, q, k, v, segments, lse, delta, d_out):
    kv_heads = k.shape[2]
    q_NBKGTD, do_NBKGTD = _query_blocks(q, kv_heads, grid), _query_blocks(d_out, kv_heads, grid)
    k_MBKSD, v_MBKSD = _key_blocks(k, grid), _key_blocks(v, grid)
    lse_NBKGT, delta_NBKGT = _row_blocks(lse, kv_heads, grid), _row_blocks(delta, kv_heads, grid)
    segment_blocks = _segment_blocks(segments, grid)

    def visit(carry, pair):
        i, j = pair
        dq, dk, dv = carry
        q_BKGTD, do_BKGTD = _at(q_NBKGTD, i), _at(do_NBKGTD, i)
        scores = _scores(grid, q_NBKGTD, k_MBKSD, segment_blocks, i, j)
        p_BKGTS = jnp.exp(scores - _at(lse_NBKGT, i)[..., None])
        dp_BKGTS = _dot("bkgtd,bksd->bkgts", do_BKGTD, _at(v_MBKSD, j))
        ds_BKGTS = p_BKGTS * (dp_BKGTS - _at(delta_NBKGT, i)[..., None]) * grid.scale
        dv = _add(dv, _dot("bkgts,bkgtd->bksd", p_BKGTS.astype(d_out.dtype), do_BKGTD), j)
        dk = _add(dk, _dot("bkgts,bkgtd->bksd", ds_BKGTS.astype(q.dtype), q_BKGTD), j)
        dq = _add(dq, _dot("bkgts,bksd->bkgtd", ds_BKGTS.astype(k.dtype), _at(k_MBKSD, j)), i)
        return (dq, dk, dv), None

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q_NBKGTD, k_MBKSD, v_MBKSD))
    (dq, dk, dv), _ = lax.scan(visit, zeros, tuple(grid.pairs.T))
    return _from_query_blocks(dq, grid), _from_key_blocks(dk, grid), _from_key_blocks(dv, grid)


def _scores(grid: Grid, q_NBKGTD, k_MBKSD, segment_blocks, i, j):
    """float32[B, K, G, T, S] of block pair (i, j), scaled; `MASKED_SCORE` where a query may not see a key."""
    scores = _dot("bkgtd,bksd->bkgts", _at(q_NBKGTD, i), _at(k_MBKSD, j)) * grid.scale
    t_T = i * grid.query_block + jnp.arange(grid.query_block)
    s_S = j * grid.key_block + jnp.arange(grid.key_block)
    seen_BTS = (s_S < grid.keys)[None, None, :]
    if grid.causal:
        seen_BTS &= (t_T[:, None] >= s_S[None, :])[None]
    if segment_blocks is not None:
        q_NBT, k_MBS = segment_blocks
        seen_BTS &= _at(q_NBT, i)[:, :, None] == _at(k_MBS, j)[:, None, :]
    return jnp.where(seen_BTS[:, None, None], scores, MASKED_SCORE)


def _dot(spec: str, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _at(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x, block, index):
    return lax.dynamic_update_index_in_dim(x, block, index, 0)


def _add(x, block, index):
    return _put(x, _at(x, index) + block, index)


def _cut(x, axis: int, block: int):
    """Splits the positions on `axis` into blocks, the last filled up with zeros, and puts blocks first."""
    length = x.shape[axis]
    count = -(-length // block)
    x = jnp.pad(x, [(0, count * block - length if a == axis else 0) for a in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)


def _query_blocks(x_BTHD, kv_heads: int, grid: Grid):
    x_NBTHD = _cut(x_BTHD, 1, grid.query_block)
    n, b, t, h, d = x_NBTHD.shape
    return x_NBTHD.reshape(n, b, t, kv_heads, h // kv_heads, d).transpose(0, 1, 3, 4, 2, 5)


def _from_query_blocks(x_NBKGTD, grid: Grid):
    n, b, k, g, t, d = x_NBKGTD.shape
    return x_NBKGTD.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * t, k * g, d)[:, : grid.queries]


def _key_blocks(x_BSKD, grid: Grid):
    return _cut(x_BSKD, 1, grid.key_block).transpose(0, 1, 3, 2, 4)


def _from_key_blocks(x_MBKSD, grid: Grid):
    m, b, k, s, d = x_MBKSD.shape
    return x_MBKSD.transpose(1, 0, 3, 2, 4).reshape(b, m * s, k, d)[:, : grid.keys]


def _row_blocks(x_BHT, kv_heads: int, grid: Grid):
    x_NBHT = _cut(x_BHT, 2, grid.query_block)
    n, b, h, t = x_NBHT.shape
    return x_NBHT.reshape(n, b, kv_heads, h // kv_heads, t)


def _from_row_blocks(x_NBKGT, grid: Grid):
    n, b, k, g, t = x_NBKGT.shape
    return x_NBKGT.transpose(1, 2, 3, 0, 4).reshape(b, k * g, n * t)[..., : grid.queries]


def _segment_blocks(segments, grid: Grid):
    if segments is None:
        return None
    return _cut(segments[0], 1, grid.query_block), _cut(segments[1], 1, grid.key_block)
