"""What each device of `seq` works on: counted as blocks are visited, in an instrumented run."""

from collections import Counter, defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel import attention_blocks
from jaxpar.parallel.attention_blocks import Grid
from jaxpar.parallel.sequence import SequenceLayout
from tests.parallel.test_sequence import STRATEGIES, draw, split

LENGTH, BLOCK, HEADS = 256, 8, 8


@pytest.fixture
def visited(monkeypatch):
    """By device of `seq`: how often each pair of blocks was visited, by where in the row they start, and the share of
    the heads."""
    found = defaultdict(Counter)
    scores = attention_blocks._scores

    def record(heads, device, *at):
        found[int(device)][(*map(int, at), heads)] += 1

    def counted(grid, walk, q, k, segments, i, j):
        heads = q.shape[2] * q.shape[3] / HEADS
        starts = ((walk.query_starts, i, grid.query_block), (walk.key_starts, j, grid.key_block))
        at = (n * block if s is None else jnp.asarray(s)[n] for s, n, block in starts)
        jax.debug.callback(partial(record, heads), jax.lax.axis_index("seq"), *at)
        return scores(grid, walk, q, k, segments, i, j)

    monkeypatch.setattr(attention_blocks, "_scores", counted)
    return found


def run(layout, backward=False, **mask):
    """Forward alone, or both."""
    qkv = draw(HEADS, HEADS, LENGTH)

    def attend(*qkv):
        return split(layout, *qkv, None, block=BLOCK, **mask)

    out = jax.jit(lambda *x: jax.vjp(attend, *x)[1](x[0]) if backward else attend(*x))(*qkv)
    jax.block_until_ready(out)
    jax.effects_barrier()


def live(**mask):
    """The pairs of blocks in which something is seen, by definition."""
    ahead = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    seen = (ahead >= 0) & (ahead < mask.get("window", LENGTH))
    blocks = seen.reshape(LENGTH // BLOCK, BLOCK, -1, BLOCK).any((1, 3))
    return {(int(q) * BLOCK, int(k) * BLOCK) for q, k in np.argwhere(blocks)}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["ring 4", "allgather 4", "hybrid 2x2", "ulysses 4"])
def test_every_device_has_the_same_share_of_half_of_all_pairs(visited, name, backward):
    """Otherwise the last device works for all, or blocks that no query sees are worked through too.

    Counted in pairs of positions, times the share of the heads.
    """
    layout = STRATEGIES[name]
    run(layout, backward)
    shares = [sum(n * heads * BLOCK**2 for (*_, heads), n in visited[d].items()) for d in range(layout.devices)]
    least = LENGTH**2 / 2 / layout.devices * (2 if backward else 1)
    assert len(set(shares)) == 1, shares
    assert least < shares[0] <= 1.1 * least


@pytest.mark.parametrize("name", ["ring 2", "ring 4", "allgather 4", "hybrid 2x2"])
@pytest.mark.parametrize("mask", [{}, {"window": 1}, {"window": 20}], ids=str)
def test_each_live_pair_is_visited_once_and_no_other(visited, name, mask):
    """Otherwise a far block of a window, or a masked one, costs as much as one that is seen."""
    layout = STRATEGIES[name]
    run(layout, **mask)
    found = Counter()
    for device in range(0, layout.devices, layout.members):
        found.update({(q, k): n for (q, k, _), n in visited[device].items()})
    assert found == Counter(live(**mask))


def test_ragged_blocks_of_neighbouring_parts_do_not_count_as_seen():
    """Otherwise a part's last block, filled up with positions of the next part, sees what lies ahead of it."""
    grid = Grid(52, 52, 16, True, 1.0, query_parts=2, key_parts=2)  # parts of 26: 16 and 10
    starts = SequenceLayout(2, 1).part_starts(52)
    live = grid.live(grid.query_starts(starts[0]), grid.key_starts(starts[1]))
    # Positions 0 to 25 see none of 26 to 77; 78 to 103 see all of them.
    assert live.tolist() == [[False] * 4] * 2 + [[True] * 4] * 2
