"""Attention over positions that are split over `seq` equals attention on one device, in outputs and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.pairwise import pairwise
from jaxpar.parallel.attention import blockwise_attention
from jaxpar.parallel.attention_blocks import LSE_FLOOR, merge
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.parallel.sequence_attention import attend_over_sequence
from tests.parallel.test_attention import MANUAL, assert_close, out_and_grads

# Parts of 26 or 52 positions in blocks of 8: several, of which the last is ragged.
LENGTH, BLOCK, DIM, ROWS = 208, 8, 4, 2

STRATEGIES = {
    "ring 2": SequenceLayout(2, 1),
    "ring 4": SequenceLayout(4, 1),
    "ulysses 4": SequenceLayout(1, 4),
    "allgather 4": SequenceLayout(4, 1, gathers=True),
    "hybrid 2x2": SequenceLayout(2, 2),
    "hybrid 2x4": SequenceLayout(2, 4),
    "hybrid 4x2": SequenceLayout(4, 2),
}
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window 1000": {"window": 1000},
}
FACTORS = {
    "strategy": list(STRATEGIES),
    "mask": list(MASKS),
    "heads": [(8, 8), (8, 2), (8, 1)],
    "packed": [False, True],
    "tensor": [1, 2],
}


def documents(*lengths):
    """int32[1, LENGTH]: documents of these lengths, and padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.pad(ids, (0, LENGTH - ids.size))[None], jnp.int32)


PACKED = jnp.concatenate([documents(65, 78, 65), documents(5, 6, 5, 100)])
PADDING = jnp.zeros((ROWS, LENGTH), jnp.int32)


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


def draw(heads, kv_heads, length=LENGTH, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(ROWS, length, n, DIM)), dtype) for n in (heads, kv_heads, kv_heads))


def split(layout, q, k, v, segments, tensor=1, block=BLOCK, **mask):
    """As the executor calls it, on whole rows in their own order."""
    names = ("data", "pipe", "tensor", "seq", "expert")
    sizes = (1, 1, tensor, layout.devices, 1)
    mesh = jax.make_mesh(sizes, names, (AxisType.Auto,) * 5, devices=jax.devices()[: tensor * layout.devices])
    order = layout.order(q.shape[1]).reshape(-1)

    def local(q, k, v, segments):
        return attend_over_sequence(q, k, v, layout=layout, tensor=tensor, segments=segments, block=block, **mask)

    rows = P(None, "seq")
    arrays = jax.tree.map(lambda x: jnp.take(x, order, axis=1), (q, k, v, segments))
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, axis_names=set(MANUAL))
    return jnp.take(run(*arrays), np.argsort(order), axis=1)


@functools.cache
def program(strategy, mask, packed, tensor):
    """(q, k, v, segments) -> output and gradients; `strategy` None: one device."""

    @jax.jit
    def run(qkv, segments):
        def attend(q, k, v):
            if strategy is None:
                return blockwise_attention(q, k, v, segments_q=segments, block=BLOCK, **MASKS[mask])
            return split(STRATEGIES[strategy], q, k, v, segments, tensor, **MASKS[mask])

        return out_and_grads(attend, qkv)

    return run


@functools.cache
def wanted(mask, heads, kind):
    segments = {"none": None, "packed": PACKED, "padding": PADDING}[kind]
    return program(None, mask, kind != "none", 1)(draw(*heads), segments)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: " ".join(map(str, row.values())))
def test_output_and_gradients_equal_one_device(row):
    """Otherwise a block is left out, seen twice, or masked by positions that it does not hold."""
    tensor = min(row["tensor"], 8 // STRATEGIES[row["strategy"]].devices)
    run = program(row["strategy"], row["mask"], row["packed"], tensor)
    for kind, segments in {"packed": PACKED, "padding": PADDING}.items() if row["packed"] else [("none", None)]:
        assert_close(run(draw(*row["heads"]), segments), wanted(row["mask"], row["heads"], kind), 3e-6)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 6), min_size=LENGTH, max_size=LENGTH), st.sampled_from(["causal", "window 5"]))
def test_any_segments_equal_one_device(ids, mask):
    """Otherwise some layout of documents leaks, or leaves a query without the keys that it should see."""
    segments = jnp.asarray([sorted(ids), ids], jnp.int32)  # documents of any length; and in pieces
    qkv = draw(8, 2)
    expected = program(None, mask, True, 1)(qkv, segments)
    assert_close(program("ring 4", mask, True, 1)(qkv, segments), expected, 3e-6)


@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_any_layout_equals_one_device(data):
    """Otherwise some number of devices, or a length that no block divides, is cut wrongly."""
    groups = data.draw(st.integers(1, 8), "groups")
    members = data.draw(st.integers(1, 8 // groups), "members")
    layout = SequenceLayout(groups, members, gathers=members == 1 and data.draw(st.booleans(), "gathers"))
    length = layout.multiple * data.draw(st.integers(1, 19), "positions of a part")
    mask = data.draw(st.sampled_from([{}, {"causal": False}, {"window": 3}, {"window": 30}]), "mask")
    heads, kv_heads = data.draw(st.sampled_from([(8, 4), (6, 3), (4, 1)]), "heads")
    qkv = draw(heads, kv_heads, length)

    def attend(q, k, v):
        return split(layout, q, k, v, None, **mask)

    expected = out_and_grads(functools.partial(blockwise_attention, **mask), qkv)
    assert_close(out_and_grads(attend, qkv), expected, 3e-6)


def test_parts_merge_without_overflow_and_where_nothing_was_seen():
    """Otherwise exp(200) is inf, or a query that sees no key anywhere becomes NaN or a mean."""
    ones = jnp.ones((1, 1, 1, DIM))
    lse = functools.partial(jnp.full, (1, 1, 1))
    for first, second in ((-100.0, 100.0), (100.0, -100.0)):
        out, total = merge(ones * first, lse(first), ones * second, lse(second))
        assert float(total[0, 0, 0]) == 100.0 and (out == 100.0).all()
    out, total = merge(ones, lse(3.0), 0 * ones, lse(LSE_FLOOR))
    assert float(total[0, 0, 0]) == 3.0 and (out == 1.0).all()
    out, total = merge(0 * ones, lse(LSE_FLOOR), 0 * ones, lse(LSE_FLOOR))
    assert (total == LSE_FLOOR).all() and (out == 0).all()
