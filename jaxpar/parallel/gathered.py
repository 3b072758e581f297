"""Attention to gathered keys: every device keeps its queries and gathers all keys and values (Llama 3, 2024).

Cheap where key heads are few. Backward gathers them again rather than keeping them, and returns their gradients by one
reduce-scatter, in float32. Zigzag order gives every device the same number of live blocks.
"""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.parallel.attention_blocks import Grid, Walk, backward_blocks, forward_blocks
from jaxpar.parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class Gathered:
    """`grid`: of one device's queries against the keys of the whole row."""

    layout: SequenceLayout
    grid: Grid

    def forward(self, q, k, v, segments):
        return forward_blocks(self.grid, q, *self._gather(k, v), self._gather_segments(segments), self._walk())

    def backward(self, q, k, v, segments, lse, delta, d_out):
        keys, segments = self._gather(k, v), self._gather_segments(segments)
        dq, *home = backward_blocks(self.grid, q, *keys, segments, lse, delta, d_out, self._walk())
        return dq, *(lax.psum_scatter(x, "seq", scatter_dimension=1, tiled=True) for x in home)

    def _gather(self, *xs):
        return tuple(lax.all_gather(x, "seq", axis=1, tiled=True) for x in xs)

    def _gather_segments(self, segments):
        return None if segments is None else (segments[0], *self._gather(segments[1]))

    def _walk(self) -> Walk:
        pairs, visits, query_starts, key_starts = self._tables
        me = self.layout.group_index()
        count = None if (visits == visits[0]).all() else jnp.asarray(visits)[me]
        return Walk(jnp.asarray(pairs)[me], jnp.asarray(query_starts)[me], key_starts, count)

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """By device: pairs, how many are live, where query blocks start; and where the gathered key blocks start."""
        starts = self.layout.part_starts(self.grid.queries)
        key_starts = self.grid.key_starts(starts.reshape(-1))
        query_starts = np.stack([self.grid.query_starts(s) for s in starts])
        live = [np.argwhere(self.grid.live(s, key_starts)) for s in query_starts]
        visits = np.asarray([len(pairs) for pairs in live], np.int32)
        table = np.zeros((len(live), int(visits.max()), 2), np.int32)
        for device, pairs in enumerate(live):
            table[device, : len(pairs)] = pairs
        return table, visits, query_starts, key_starts
