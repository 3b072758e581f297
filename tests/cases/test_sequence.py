"""What sequence parallelism gets wrong elsewhere: averages, order, heads that do not divide, leaks, merges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program
from jaxpar.parallel.attention import blockwise_attention
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.plan import Hybrid
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from models.llama import Llama
from tests.cases.models import Times
from tests.parallel.test_attention import assert_close, dense, out_and_grads
from tests.parallel.test_sequence import split
from tests.parity.references import assert_equals_one_device, one_device_run

SMALL = replace(TOY, num_layers=1)
MHA = replace(SMALL, num_kv_heads=8)


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


def started(mesh, build=SMALL.build, **options):
    return run_on_enough_devices(Program(build, optax.sgd(0.1), Plan(mesh, **options)))


@pytest.fixture(scope="module")
def cached():
    """What several tests are held against, worked out once."""
    found = {}

    def get(name, make):
        if name not in found:
            found[name] = make()
        return found[name]

    return get


@pytest.mark.parametrize("seq", [2, 4, 8])
def test_the_gradient_does_not_depend_on_how_many_devices_share_the_valid_tokens(seq):
    """Otherwise one valid token gives a gradient divided by seq, and a part without any gives 0/0."""
    run = started(f"seq={seq}")
    for counted in (slice(5, 6), slice(0, 16), slice(0, 4)):
        batch = make_batch("ones", 4, SMALL.vocab_size)
        batch["weights"] = np.zeros_like(batch["weights"])
        batch["weights"][:1, counted] = 1.0
        right = run_loss_and_grads(one_device_run(SMALL), batch)
        assert compare(*run_loss_and_grads(run, batch), *right) == []
        _, metrics = run.gradients(run.init(0), run.put(batch))
        assert float(metrics["weight/cross_entropy"]) == counted.stop - counted.start
        assert float(metrics["loss"]) == float(metrics["cross_entropy"]) == pytest.approx(right[0], rel=1e-6)


@pytest.mark.parametrize("mesh", ["seq=8", "data=2,seq=4", "data=4,seq=2"])
def test_gradients_of_ulysses_are_those_of_one_device(mesh):
    """Otherwise they are seq times too large."""
    assert_equals_one_device(MHA, Plan(mesh, attention="ulysses"), ["uneven"], rows=8)


def test_copies_stay_equal_where_seq_alone_sums_gradients():
    """Otherwise, without data to sum over, each device keeps its own part."""
    run = started("seq=8", MHA.build, attention="ulysses")
    state, _ = run.step(run.init(0), run.put(make_batch("uneven", 8, MHA.vocab_size)))
    for x in state.params.values():
        copies = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(copies) == 8 and all(np.array_equal(copies[0], c) for c in copies)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layout"),
    [
        (8, 2, SequenceLayout(1, 4)),  # key heads repeated
        (28, 7, SequenceLayout(1, 2)),  # filled up to 32 and 8
        (6, 3, SequenceLayout(1, 2)),  # to 8 and 4
        (8, 4, SequenceLayout(4, 2)),
    ],
    ids=str,
)
def test_heads_that_ulysses_cannot_share_as_they_are_equal_one_device(heads, kv_heads, layout):
    """Otherwise filling up loses the ratio of query to key heads, and queries read the wrong keys."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(2, 32, n, 4)), jnp.float32) for n in (heads, kv_heads, kv_heads)]
    found = out_and_grads(lambda *x: split(layout, *x, None), qkv)
    assert_close(found, out_and_grads(lambda *x: dense(*x)[0], qkv))


def test_zigzag_order_gives_every_device_an_early_and_a_late_part():
    """Otherwise the last device works longest; and everything below relies on this order."""
    expected = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert SequenceLayout.of(Plan("seq=4"), 4).order(16).tolist() == expected
    assert SequenceLayout.of(Plan("seq=4", attention="allgather"), 4).order(16).tolist() == expected
    assert SequenceLayout.of(Plan("seq=4", attention=Hybrid(2)), 4).order(16).tolist() == [
        *[[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    ]
    assert SequenceLayout.of(Plan("seq=4", attention="ulysses"), 4).order(16).reshape(-1).tolist() == list(range(16))


class Places(nnx.Module):
    """Each total counts where an array does not hold, at a position, what belongs there."""

    def __init__(self, *, rngs):
        self.blocks = jaxpar.stack(Times, 1, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["tokens"].astype(jnp.float32)

    def head(self, x, batch, ctx):
        index = ctx.index[None, :]
        wrong = {
            "tokens": batch["tokens"] != index,
            "activations": x != index,
            "targets": batch["targets"] != index + 1,
            "weights": batch["weights"] != index + 2,
            "positions": ctx.positions != (index + 3 if "positions" in batch else index),
        }
        if "segments" in batch:
            wrong["segments"] = ctx.segments != index + 4
        return {name: jnp.sum(jnp.broadcast_to(w, x.shape).astype(jnp.float32)) for name, w in wrong.items()}

    def terms(self, batch):
        names = ("tokens", "activations", "targets", "weights", "positions")
        names += ("segments",) if "segments" in batch else ()
        # Each row's first weight is 2, which only a row in its own order has there.
        return {name: jaxpar.Term(jnp.sum(batch["weights"][:, 0]) / 2) for name in names}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["ring", "ulysses", Hybrid(2)], ids=str)
def test_everything_with_positions_travels_with_the_tokens(attention, packed):
    """Otherwise rotary positions, documents, targets or weights belong to other tokens than those they stand beside."""
    index = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
    batch = {"tokens": index, "targets": index + 1, "weights": (index + 2).astype(np.float32)}
    batch |= {"positions": index + 3, "segments": index + 4} if packed else {}
    run = started("seq=4", Places, attention=attention)
    _, metrics = run.gradients(run.init(0), run.put(batch))
    metrics = {name: float(value) for name, value in metrics.items()}
    assert {name: value for name, value in metrics.items() if value} == {
        f"weight/{name}": 2.0 for name in metrics if f"weight/{name}" in metrics
    }


class NextButOne(Llama):
    """Predicts the token after the next one too: its targets are shifted by one more before rows are split."""

    def head(self, x, batch, ctx):
        x = self.norm(x)
        return {
            name: jaxpar.cross_entropy(x, self.table_VD, batch[name], batch["weights"])
            for name in ("targets", "second")
        }

    def terms(self, batch):
        weight = jnp.sum(batch["weights"])
        return {"targets": jaxpar.Term(weight), "second": jaxpar.Term(weight, coef=0.3)}


@pytest.mark.parametrize(("seq", "attention"), [(4, "ring"), (4, "ulysses"), (8, Hybrid(2)), (4, "allgather")], ids=str)
def test_the_score_of_every_token_is_that_of_one_device(cached, seq, attention):
    """Otherwise order, positions or a shift differ by what averages hide: here every token has a weight of its own."""
    batch = make_batch("uneven", 4, SMALL.vocab_size)
    batch["weights"] = np.cos(np.arange(batch["tokens"].size, dtype=np.float32)).reshape(4, -1) + 1.1
    batch["second"] = np.roll(batch["targets"], -1, axis=1)
    axes = dict(jaxpar.TOKENS) | {"second": ("rows", "positions")}
    program = partial(Program, partial(NextButOne, SMALL), optax.sgd(0.1), batch_axes=axes)
    run = run_on_enough_devices(program(Plan(f"seq={seq}", attention=attention)))
    alone = cached("next but one", lambda: run_loss_and_grads(run_on_enough_devices(program(Plan("data=1"))), batch))
    assert compare(*run_loss_and_grads(run, batch), *alone) == []


STRATEGIES = [SequenceLayout(4, 1), SequenceLayout(1, 4), SequenceLayout(2, 2), SequenceLayout(4, 1, gathers=True)]


@pytest.mark.parametrize("layout", STRATEGIES, ids=str)
@pytest.mark.parametrize("lengths", [(8, 8), (5, 6, 5)])
def test_a_document_never_sees_another_across_the_borders_of_devices(layout, lengths):
    """Otherwise packed rows train on their neighbours as soon as positions are split."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(1, 16, n, 4)), jnp.float32) for n in (8, 4, 4)]
    segments = jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths)[None], jnp.int32)
    attend = jax.jit(lambda *x: split(layout, *x, segments))
    before = np.asarray(attend(*qkv))
    after = np.asarray(attend(*(x.at[0, 0].add(3.0) for x in qkv)))
    changed = (before != after).any(axis=(0, 2, 3))
    assert changed.tolist() == [i < lengths[0] for i in range(16)]
    last = slice(16 - lengths[-1], 16)
    assert_close(before[:, last], blockwise_attention(*(x[:, last] for x in qkv)))


def test_errors_in_bfloat16_do_not_grow_with_the_ring():
    """Otherwise parts are merged, or gradients of keys travel, in bfloat16: one more rounding a device."""
    rng = np.random.default_rng(0)
    low = [jnp.asarray(rng.normal(size=(2, 256, n, 8)), jnp.bfloat16) for n in (4, 2, 2)]
    exact = jax.tree.leaves(out_and_grads(lambda *x: dense(*x)[0], [x.astype(jnp.float32) for x in low]))

    def errors(layout):
        attend = blockwise_attention if layout is None else lambda *x: split(layout, *x, None, block=32)
        found = jax.tree.leaves(out_and_grads(attend, low))
        return [float(jnp.abs(x.astype(jnp.float32) - e).max()) for x, e in zip(found, exact, strict=True)]

    alone = errors(None)
    for groups in (2, 4, 8):
        for error, least in zip(errors(SequenceLayout(groups, 1)), alone, strict=True):
            assert error <= 1.5 * least, (groups, error, least)
