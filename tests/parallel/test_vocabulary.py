"""A table shared over the stages of a pipeline is one that jaxpar knows to be in slices, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Plan, PlanError, Program
from jaxpar.testing import assert_parity, run_on_enough_devices

VOCAB, WIDTH = 13, 8
init = nnx.initializers.lecun_normal()


class Mix(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, ctx):
        return x + jnp.tanh(self.up(x))


class Words(nnx.Module):
    """Looks up and scores words in the ways given; the head has a table of its own."""

    def __init__(self, embed, head, names=("vocab", "embed"), rows=VOCAB, scored=VOCAB, *, rngs):
        self.table = nnx.Param(jaxpar.named(init, *names)(rngs.params(), (rows, WIDTH), jnp.float32))
        self.out = nnx.Param(jaxpar.named(init, *names)(rngs.params(), (scored, WIDTH), jnp.float32))
        self.blocks = jaxpar.stack(Mix, 2, rngs=rngs)
        self.ways = nnx.static((embed, head))

    def embed(self, batch, ctx):
        return self.ways[0](self.table[...], batch["tokens"])

    def head(self, x, batch, ctx):
        return {"cross_entropy": self.ways[1](x, self.out[...], batch["targets"], batch["weights"])}

    def terms(self, batch):
        return {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"]))}


def own_softmax(x, table, targets, weights):
    scores = jax.nn.log_softmax(x @ table.T)
    return -jnp.sum(weights * jnp.take_along_axis(scores, targets[..., None], -1)[..., 0])


def own_lookup(table, ids):
    return table[ids]


def in_jit(f):
    return jax.jit(f)


def closed_over(f):
    """The table does not come as an argument of what is jitted."""
    return lambda x, table, targets, weights: jax.jit(lambda x: f(x, table, targets, weights))(x)


def in_scan(f):
    """Row by row."""

    def each(x, table, targets, weights):
        def body(total, row):
            x, t, w = row
            return total + f(x[None], table, t[None], w[None]), None

        return jax.lax.scan(body, jaxpar.collectives.vary(jnp.float32(0)), (x, targets, weights))[0]

    return each


def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCAB, (2, 4, 6)).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "weights": rng.random((4, 6)).astype(np.float32)}


def program(embed=jaxpar.embedding_lookup, head=jaxpar.cross_entropy, mesh="pipe=2", **options):
    def build(rngs):
        return Words(embed, head, rngs=rngs, **options)

    return Program(build, optax.sgd(0.1), Plan(mesh, microbatches=2))


def lower(program):
    return run_on_enough_devices(program).lower(jaxpar.token_shapes(4, 6))


WRONG_HEADS = {
    "plain": own_softmax,
    "jit": in_jit(own_softmax),
    "closed over": closed_over(own_softmax),
    "checkpoint": jax.checkpoint(own_softmax),
    "scan": in_scan(own_softmax),
    "a function of one's own derivative": lambda x, table, *rest: own_softmax(x, jax.nn.relu(table), *rest),
    "cast": lambda x, table, *rest: own_softmax(x, table.astype(jnp.bfloat16).astype(jnp.float32), *rest),
}


@pytest.mark.parametrize("head", WRONG_HEADS.values(), ids=WRONG_HEADS)
def test_a_softmax_of_ones_own_over_a_slice_is_refused(head):
    """Otherwise it would be one over half of the vocabulary, and train without a word."""
    with pytest.raises(PlanError, match=r"out: its rows, named 'vocab', are shared over the stages of `pipe`"):
        lower(program(head=head))


@pytest.mark.parametrize("lookup", [own_lookup, jax.jit(own_lookup)], ids=["plain", "jit"])
def test_indexing_a_slice_is_refused_with_the_mend(lookup):
    """Otherwise ids past the slice would be clipped to its last row."""
    with pytest.raises(PlanError, match=r"table: .*use jaxpar.embedding_lookup .*named\(init, P\('tensor', None\)\)"):
        lower(program(embed=lookup))


GOOD_HEADS = {"jit": in_jit, "closed over": closed_over, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("around", GOOD_HEADS.values(), ids=GOOD_HEADS)
def test_jaxpars_own_cross_entropy_may_stand_in_any_plain_call(around):
    """Otherwise a model would have to be rewritten for a pipeline."""
    lower(program(head=around(jaxpar.cross_entropy)))


@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=2,tensor=2"])
def test_a_table_with_the_mesh_axis_itself_is_whole_on_every_stage(mesh):
    """Otherwise there would be no way to pipeline a head that jaxpar does not know. 14 rows divide over tensor."""
    own = program(own_lookup, own_softmax, mesh, names=(P("tensor", None),), rows=14, scored=14)
    assert_parity(own, batch())


def test_two_vocabularies_whose_slices_are_alike_are_refused():
    """Otherwise the rows of one are counted as those of the other: 13 and 14 on two stages are both slices of 7."""
    with pytest.raises(PlanError, match=r"out \(14\) and table \(13\) are both cut into slices of 7 rows"):
        lower(program(scored=14))
    assert_parity(program(scored=15), batch())
