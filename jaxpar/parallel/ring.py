"""Ring attention: every group keeps its queries, keys and values travel once round (Liu et al., 2023).

What arrives is attended to while the next part is on its way, and merged in float32 by log-sum-exp. Backward the
same ring runs again: gradients of keys and values travel with them, and come home after a full turn. With zigzag order
and a causal mask every visit is half of a whole one, the same half-blocks on no device masked in vain.

Letters as in `attention_blocks`.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.parallel.attention_blocks import Grid, Walk, backward_blocks, forward_blocks, merge
from jaxpar.parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class Ring:
    """`grid`: of one group's queries against one group's keys."""

    layout: SequenceLayout
    grid: Grid

    def forward(self, q, k, v, segments):
        """-> output float32[b, t, H, d], log-sum-exp float32[b, H, t]; arguments are one group's, on each member."""
        own, keys = (None, None) if segments is None else segments
        arriving = self._send((k, v, keys))
        out, lse = self._visit(0, q, (k, v, keys), own)

        def step(carry, n):
            (out, lse), arrived = carry
            arriving = self._send(arrived)
            return (merge(out, lse, *self._visit(n, q, arrived, own)), arriving), None

        ((out, lse), last), _ = lax.scan(step, ((out, lse), arriving), self._middle)
        return merge(out, lse, *self._visit(self.layout.groups - 1, q, last, own))

    def backward(self, q, k, v, segments, lse, delta, d_out):
        """-> float32 gradients of q, k, v."""
        own, keys = (None, None) if segments is None else segments
        arriving = self._send((k, v, keys))
        dq, *home = self._visit_back(0, q, (k, v, keys), own, lse, delta, d_out)

        def step(carry, n):
            dq, travelling, arrived = carry
            travelling, arriving = self._send(travelling), self._send(arrived)
            more, *new = self._visit_back(n, q, arrived, own, lse, delta, d_out)
            return (dq + more, jax.tree.map(jnp.add, travelling, new), arriving), None

        (dq, travelling, last), _ = lax.scan(step, (dq, home, arriving), self._middle)
        travelling = self._send(travelling)
        more, *new = self._visit_back(self.layout.groups - 1, q, last, own, lse, delta, d_out)
        dk, dv = self._send(jax.tree.map(jnp.add, travelling, new))
        return dq + more, dk, dv

    @property
    def _middle(self):
        """The steps between the first, whose keys are the group's own, and the last, after which nothing is sent."""
        return jnp.arange(1, self.layout.groups - 1)

    def _visit(self, n, q, arrived, own):
        k, v, keys = arrived
        return forward_blocks(self._masks(n), q, k, v, None if own is None else (own, keys), self._walk(n))

    def _visit_back(self, n, q, arrived, own, lse, delta, d_out):
        k, v, keys = arrived
        segments = None if own is None else (own, keys)
        return backward_blocks(self._masks(n), q, k, v, segments, lse, delta, d_out, self._walk(n))

    def _masks(self, n) -> Grid:
        """Blocks that are visited after the first step are seen whole, unless a window cuts them."""
        first = isinstance(n, int) and n == 0
        return self.grid if first or self.grid.window is not None else replace(self.grid, causal=False)

    def _walk(self, n) -> Walk:
        """The live blocks of this group's queries and the keys that come from `n` groups before it."""
        me = self.layout.group_index()
        there = (me - n) % self.layout.groups
        starts = self.layout.part_starts(self.grid.queries)
        query_starts = jnp.asarray(np.stack([self.grid.query_starts(s) for s in starts]))[me]
        key_starts = jnp.asarray(np.stack([self.grid.key_starts(s) for s in starts]))[there]
        if self.grid.window is not None:
            pairs, visits = (jnp.asarray(a) for a in self._windowed)
            return Walk(pairs[me, there], query_starts, key_starts, visits[me, there])
        own, behind, ahead = self._pairs
        if isinstance(n, int) and n == 0:
            return Walk(own, query_starts, key_starts)
        return Walk(jnp.where(there < me, behind, ahead), query_starts, key_starts)

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int32[pairs, 2]: against the group's own keys, those of a group before it, those of one after it; the same
        for every group. The last two are equally many."""
        starts = self.layout.part_starts(self.grid.queries)
        middle = self.layout.groups // 2
        live = [self._live(starts[q], starts[k]) for q, k in ((0, 0), (middle, 0), (0, middle))]
        own, behind, ahead = (np.argwhere(pairs).astype(np.int32) for pairs in live)
        return own, behind, ahead

    @cached_property
    def _windowed(self) -> tuple[np.ndarray, np.ndarray]:
        """int32[group, group of the keys, pairs, 2], and how many of them are live: groups differ."""
        starts = self.layout.part_starts(self.grid.queries)
        live = [[np.argwhere(self._live(q, k)) for k in starts] for q in starts]
        counts = np.asarray([[len(pairs) for pairs in row] for row in live], np.int32)
        table = np.zeros((*counts.shape, max(int(counts.max()), 1), 2), np.int32)
        for q, row in enumerate(live):
            for k, pairs in enumerate(row):
                table[q, k, : len(pairs)] = pairs
        return table, counts

    def _live(self, query_parts: np.ndarray, key_parts: np.ndarray) -> np.ndarray:
        return self.grid.live(self.grid.query_starts(query_parts), self.grid.key_starts(key_parts))

    def _send(self, tree):
        """Every device to the same member of the next group."""
        size = self.layout.devices
        pairs = [(i, (i + self.layout.members) % size) for i in range(size)]
        return jax.tree.map(partial(lax.ppermute, axis_name="seq", perm=pairs), tree)
