"""Blockwise attention against a dense softmax, on one device and with its heads split over `tensor`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.parallel import attention_blocks
from jaxpar.parallel.attention import attend_on_tensor_shards, attention_with_lse, blockwise_attention
from jaxpar.parallel.attention_blocks import LSE_FLOOR, Grid

# Two rows: documents 5, 6 and 5 long; one 9 long, then padding.
PACKED = jnp.asarray([[1] * 5 + [2] * 6 + [3] * 5, [1] * 9 + [0] * 7], jnp.int32)
MANUAL = ("data", "pipe", "seq", "expert")


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


def dense(q, k, v, segments_q=None, segments_k=None, causal=True):
    """The definition: output and lse in float32, from the whole score matrix; 0 where a query sees no key."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.ones(scores.shape, bool)
    if causal:
        seen &= (jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :])[None, None]
    if segments_q is not None:
        seen &= (segments_q[:, :, None] == segments_k[:, None, :])[:, None]
    p = jnp.where(seen, jnp.exp(scores), 0.0)
    total = p.sum(-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bhts,bshd->bthd", p / safe[..., None], v)
    return out, jnp.where(total > 0, jnp.log(safe), LSE_FLOOR)


def draw(queries, heads=4, kv_heads=2, dim=8, rows=2, keys=None, dtype=jnp.float32):
    keys = queries if keys is None else keys
    shapes = [(rows, queries, heads, dim), (rows, keys, kv_heads, dim), (rows, keys, kv_heads, dim)]
    rng = np.random.default_rng(queries + heads + kv_heads)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def out_and_grads(attend, qkv):
    """The output, and the gradients of a sum that weighs every output number differently."""

    @jax.jit
    def run(qkv):
        out, pull = jax.vjp(attend, *qkv)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, pull(weights.astype(out.dtype))

    return run(qkv)


def assert_close(found, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max() + 1e-6


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "block"),
    [
        *[(1, 4, 2, 128), (5, 4, 4, 128), (127, 4, 1, 128)],
        *[(128, 4, 2, 128), (129, 4, 2, 128), (300, 4, 2, 128)],
        *[(37, 4, 2, 16), (37, 4, 4, 16), (37, 4, 1, 16)],
    ],
)
def test_output_and_gradients_equal_a_dense_softmax(length, heads, kv_heads, block):
    """Wrong numbers for MHA, GQA or MQA, or at a length that the block does not divide."""
    qkv = draw(length, heads, kv_heads)
    found = out_and_grads(functools.partial(blockwise_attention, block=block), qkv)
    assert_close(found, out_and_grads(lambda *x: dense(*x)[0], qkv))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(21, 45), (45, 21)])
def test_queries_and_keys_may_differ_in_number(queries, keys, causal):
    """Wrong numbers, or padded keys seen, where keys come from elsewhere than the queries."""
    qkv = draw(queries, keys=keys)
    found = out_and_grads(functools.partial(blockwise_attention, causal=causal, block=16), qkv)
    assert_close(found, out_and_grads(lambda *x: dense(*x, causal=causal)[0], qkv))


def test_rows_taken_in_turns_equal_rows_taken_at_once(monkeypatch):
    """Rows would be mixed up, or some left out, where there are too many to take at once."""
    qkv = draw(16, rows=6)
    segments = jnp.concatenate([PACKED, PACKED + 1, PACKED[::-1]])
    monkeypatch.setattr(attention_blocks, "MAX_SCORES", 4 * 8 * 8 * 4)
    assert Grid(16, 16, 8, True, 1.0).row_turns(rows=6, heads=4) == 2
    found = out_and_grads(functools.partial(blockwise_attention, segments_q=segments, block=8), qkv)
    assert_close(found, out_and_grads(lambda *x: dense(*x, segments, segments)[0], qkv))


@pytest.mark.parametrize("block", [8, 128])
def test_packed_documents_and_padding_equal_a_dense_softmax(block):
    """Documents 5, 6, 5 long in one row, or padding, would leak into one another."""
    qkv = draw(16)
    found = out_and_grads(functools.partial(blockwise_attention, segments_q=PACKED, block=block), qkv)
    wanted = out_and_grads(lambda *x: dense(*x, PACKED, PACKED)[0], qkv)
    assert_close(found, wanted)


def test_the_first_token_of_one_document_never_changes_another():
    """A document would see its neighbour in the row, in bits too small for a tolerance."""
    q, k, v = draw(16)
    attend = jax.jit(functools.partial(blockwise_attention, segments_q=PACKED, block=8))
    before = np.asarray(attend(q, k, v))
    after = np.asarray(attend(*(x.at[0, 0].add(3.0) for x in (q, k, v))))
    assert (before[0, 5:] == after[0, 5:]).all()
    assert (before[0, :5] != after[0, :5]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("block", [4, 128])
def test_rows_without_a_key_give_zeros_and_finite_zero_gradients(block):
    """A row in which everything is masked would give NaN, or the mean of what it may not see."""
    q, k, v = draw(16)
    blind = PACKED.at[:, 3].set(7)
    attend = functools.partial(blockwise_attention, segments_q=blind, causal=False, block=block)
    attend = functools.partial(attend, segments_k=PACKED)
    out, (dq, dk, dv) = out_and_grads(attend, (q, k, v))
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    assert (np.asarray(out)[:, 3] == 0).all()
    assert (np.asarray(dq)[:, 3] == 0).all()
    wanted = out_and_grads(lambda *x: dense(*x, blind, PACKED, causal=False)[0], (q, k, v))
    assert_close((out, (dq, dk, dv)), wanted)
    alone = out_and_grads(functools.partial(attend, segments_k=PACKED + 10), (q, k, v))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(alone))


def test_partial_results_merged_by_lse_equal_the_whole_also_in_gradients():
    """A ring that merges blocks of keys would weigh them wrongly, forward or backward."""
    qkv = draw(24)
    segments = jnp.asarray([[1] * 15 + [2] * 9] * 2)

    def merged(q, k, v):
        parts = [
            attention_with_lse(
                q, k[:, s], v[:, s], segments_q=segments, segments_k=segments[:, s], causal=False, block=8
            )
            for s in (slice(0, 12), slice(12, 24))
        ]
        total = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
        return sum(out * jnp.exp(lse - total).transpose(0, 2, 1)[..., None] for out, lse in parts)

    wanted = out_and_grads(lambda *x: dense(*x, segments, segments, causal=False)[0], qkv)
    assert_close(out_and_grads(merged, qkv), wanted)
    lse = attention_with_lse(*qkv, segments_q=segments, block=8)[1]
    assert lse.dtype == jnp.float32
    assert_close(lse, dense(*qkv, segments, segments)[1])


def test_bfloat16_stays_within_its_rounding_of_float32():
    """Sums or maxima would be taken in bfloat16: the error would grow with the number of keys."""
    low = draw(300, dtype=jnp.bfloat16)
    found = out_and_grads(functools.partial(blockwise_attention, block=64), low)
    wanted = out_and_grads(lambda *x: dense(*x)[0], tuple(x.astype(jnp.float32) for x in low))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found))
    assert_close(found, wanted, tolerance=2**-7)


def test_no_array_of_queries_times_keys_is_ever_made():
    """Memory would grow with the square of the length, forward or backward."""
    qkv = draw(512, heads=2, kv_heads=1, rows=1)
    text = {}
    for name, attend in {"blocks": blockwise_attention, "dense": lambda *x: dense(*x)[0]}.items():
        step = jax.grad(lambda *x, attend=attend: attend(*x).sum(), argnums=(0, 1, 2))
        text[name] = jax.jit(step).lower(*qkv).compile().as_text()

    def largest(hlo):
        shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", hlo)
        return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)

    assert largest(text["dense"]) >= 2 * 512 * 512
    assert largest(text["blocks"]) <= 2 * 128 * 128


def test_only_pairs_that_touch_the_lower_triangle_are_visited():
    """Half of the work would be spent above the diagonal, or a live block left out."""
    cases = [(512, 512, 128, True), (300, 300, 128, True), (45, 21, 16, True), (45, 21, 16, False)]
    for queries, keys, block, causal in cases:
        grid = Grid(queries, keys, block, causal, 1.0)
        seen = (np.arange(queries)[:, None] >= np.arange(keys)[None, :]) | (not causal)
        live = {(t // grid.query_block, s // grid.key_block) for t, s in np.argwhere(seen)}
        assert sorted(live) == [tuple(pair) for pair in grid.whole.pairs]
    assert len(Grid(512, 512, 128, True, 1.0).whole.pairs) == 10


def test_keys_that_every_device_holds_get_the_gradient_of_all_queries():
    """Queries split over devices would leave on each only its own part of the gradient of shared keys."""
    qkv = draw(16)
    mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,))
    attend = functools.partial(blockwise_attention, causal=False, block=8)
    split = jax.shard_map(attend, mesh=mesh, in_specs=(P(None, "seq"), P(), P()), out_specs=P(None, "seq"))
    assert_close(out_and_grads(split, qkv), out_and_grads(lambda *x: dense(*x, causal=False)[0], qkv))


def region(mesh, rows, attend, checkpoint):
    """Two layers of attention under scan in the partly manual region, and their gradients."""

    def layer(x, w, segments):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[name]) for name in "qkv")
        out = attend(q, k, v, segments_q=segments, block=8)
        return x + jnp.einsum("bthe,hed->btd", out, w["o"])

    def loss(w, x, segments):
        one = jax.checkpoint(layer) if checkpoint else layer
        x, _ = lax.scan(lambda x, w: (one(x, w, segments), None), x, w)
        return jnp.sum(jnp.sin(x))

    def local(w, x, segments):
        w = jax.tree.map(lambda a: lax.pcast(a, MANUAL, to="varying"), w)
        x, segments = (lax.pcast(a, ("pipe", "seq"), to="varying") for a in (x, segments))
        return jax.tree.map(lambda a: a[None], jax.value_and_grad(loss)(w, x, segments))

    if mesh is None:
        return jax.jit(jax.value_and_grad(loss))
    parts = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P(MANUAL), axis_names=set(MANUAL))
    return jax.jit(lambda *args: jax.tree.map(lambda a: a.sum(0), parts(*args)))


def layers(heads, kv_heads, dim=4, width=16):
    rng = np.random.default_rng(heads)
    shapes = {"q": (2, width, heads, dim), "k": (2, width, kv_heads, dim), "v": (2, width, kv_heads, dim)}
    shapes["o"] = (2, heads, dim, width)
    return {name: jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32) for name, s in shapes.items()}


@pytest.mark.parametrize(
    ("data", "tensor", "kv_heads", "checkpoint"),
    [(4, 2, 4, False), (4, 2, 1, True), (1, 8, 4, True), (1, 8, 1, False), (8, 1, 4, False)],
)
def test_heads_split_over_tensor_give_the_loss_and_gradients_of_one_device(
    data, tensor, kv_heads, checkpoint, monkeypatch
):
    """A head would read another's keys, or the gradient of shared keys miss a device or count it twice."""
    names = ("data", "pipe", "tensor", "seq", "expert")
    mesh = jax.make_mesh((data, 1, tensor, 1, 1), names, (AxisType.Auto,) * 5)
    monkeypatch.setattr(attention_blocks, "MAX_SCORES", 8 * 8 * 8)  # several turns a device
    w = layers(8, kv_heads)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 13, 16)), jnp.float32)
    segments = jnp.asarray([[1] * 6 + [2] * 5 + [0] * 2] * 8, jnp.int32)

    def reference(q, k, v, segments_q, block):
        return dense(q, k, v, segments_q, segments_q)[0]

    wanted = region(None, None, reference, False)(w, x, segments)
    with jax.set_mesh(mesh):
        step = region(mesh, P(("data", "expert")), attend_on_tensor_shards, checkpoint)
        assert_close(step(w, x, segments), wanted)
