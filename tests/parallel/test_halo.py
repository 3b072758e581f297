"""A user's convolutions over positions, in natural and in zigzag order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import Hybrid, ModelError, Plan, PlanError, Program
from jaxpar.estimate.compile import report
from jaxpar.parallel.halo import Halo
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.testing import compare, one_device, run_loss_and_grads, run_on_enough_devices

init = nnx.initializers.normal()
AXES = {"x": ("rows", "positions", None), "weights": ("rows", "positions"), "segments": ("rows", "positions")}
DIM, POSITIONS = 6, 32


class CausalConvolution(nnx.Module):
    """Depthwise: each feature is a weighted sum of itself at `taps` positions, the last of which is its own."""

    def __init__(self, dim, taps, *, rngs):
        self.kernel = nnx.Param(jaxpar.named(init, None, "mlp")(rngs.params(), (taps, dim), jnp.float32))

    def __call__(self, x, ctx):
        taps = self.kernel.shape[0]
        near = ctx.halo(x, before=taps - 1)
        length = near.shape[1] - (taps - 1)
        seen = [near[:, i : i + length] for i in range(taps)]
        if ctx.segments is not None:  # packed documents stay apart
            whose = ctx.halo(ctx.segments, before=taps - 1)
            own = whose[:, taps - 1 :]
            seen = [jnp.where((whose[:, i : i + length] == own)[..., None], s, 0) for i, s in enumerate(seen)]
        y = sum(w * s for w, s in zip(self.kernel[...][:, None, None], seen, strict=True))
        return x + jnp.tanh(y.reshape(x.shape))


class Smoothing(nnx.Module):
    """Flax's own convolution, centred: two positions before and one after."""

    def __init__(self, dim, *, rngs):
        self.convolution = nnx.Conv(dim, dim, (4,), padding="VALID", rngs=rngs)

    def __call__(self, x, ctx):
        return x + jnp.tanh(self.convolution(ctx.halo(x, before=2, after=1))).reshape(x.shape)


class Convolutional(nnx.Module):
    def __init__(self, layer, *, rngs):
        self.blocks = jaxpar.stack(layer, 2, rngs=rngs)

    def embed(self, batch, ctx):
        return batch["x"]

    def head(self, x, batch, ctx):
        return {"squares": jnp.sum(batch["weights"][..., None] * (x - 1) ** 2)}

    def terms(self, batch):
        return {"squares": jaxpar.Term(jnp.sum(batch["weights"]))}


def causal(*, rngs):
    return Convolutional(lambda rngs: CausalConvolution(DIM, 4, rngs=rngs), rngs=rngs)


def smoothing(*, rngs):
    return Convolutional(lambda rngs: Smoothing(DIM, rngs=rngs), rngs=rngs)


def rows(packed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(4, POSITIONS, DIM)).astype(np.float32),
        "weights": rng.random((4, POSITIONS)).astype(np.float32),
    }
    # Documents that end inside, at the edges and across the edges of what a device holds; then padding.
    layout = np.repeat([1, 2, 3, 4, 0], [5, 3, 9, 13, 2]).astype(np.int32)
    return batch | ({"segments": np.broadcast_to(layout, (4, POSITIONS))} if packed else {})


PLANS = [
    Plan("seq=2"),
    Plan("seq=4"),
    Plan("data=2,seq=4", attention="allgather", zero=3),
    Plan("tensor=2,seq=4", attention="ulysses"),
    Plan("tensor=2,seq=2", remat="full", microbatches=2),
    Plan("seq=8", attention=Hybrid(ulysses=2)),
    Plan("data=2,seq=4", attention=Hybrid(ulysses=2), zero=1, remat="dots"),
    Plan("pipe=2,seq=2", microbatches=2),
    Plan("pipe=2,seq=2,tensor=2", microbatches=2, pipeline="zero_bubble"),
]


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients on one device, by (model, packed)."""
    found = {}

    def get(build, packed):
        if (build, packed) not in found:
            program = one_device(Program(build, optax.sgd(0.1), Plan(), AXES))
            found[build, packed] = run_loss_and_grads(run_on_enough_devices(program), rows(packed))
        return found[build, packed]

    return get


CASES = [(causal, True, plan) for plan in PLANS] + [(smoothing, False, plan) for plan in PLANS[1:4]]


@pytest.mark.parametrize(("build", "packed", "plan"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_convolutions_over_split_positions_equal_one_device(build, packed, plan, expected):
    """Otherwise a feature at the edge of a device would miss its neighbours, or see wrong ones, or their gradients."""
    run = run_on_enough_devices(Program(build, optax.sgd(0.1), plan, AXES))
    loss, grads = run_loss_and_grads(run, rows(packed))
    different = compare(loss, grads, *expected(build, packed))
    assert not different, "\n".join(map(str, different))


LAYOUTS = [(1, 4), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2), (2, 3)]


@pytest.mark.parametrize(("groups", "members"), LAYOUTS)
def test_every_stretch_has_the_positions_around_it(groups, members):
    """Otherwise some order of positions would get its halo from elsewhere; checked on positions themselves."""
    layout = SequenceLayout(groups, members)
    size = layout.devices
    order = layout.order(4 * size)
    mesh = jax.make_mesh((size,), ("seq",), devices=jax.devices()[:size], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("seq")

    def local(x):
        return Halo(layout)(x, 2, 1)[None]

    held = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.asarray(order) + 1)
    wanted = [
        [[p + 1 if 0 <= p < 4 * size else 0 for p in range(piece[0] - 2, piece[-1] + 2)] for piece in pieces]
        for pieces in order.reshape(size, layout.stretches, -1)
    ]
    assert np.asarray(held).reshape(np.shape(wanted)).tolist() == wanted


def test_backward_sends_as_often_as_forward_and_keeps_nothing():
    """Otherwise it would cost more than the edges of the two stretches that a device has in zigzag order, each way."""
    run = run_on_enough_devices(Program(causal, optax.sgd(0.1), Plan("seq=4"), AXES))
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows().items()}
    sent = report(run.lower(shapes), run.mesh).totals()[("seq",), "collective-permute"]
    edge = 4 * 3 * DIM * 4  # rows, positions, features, bytes of a float32
    layers, ways, stretches = 2, 2, 2
    assert sent == (layers * ways * stretches, layers * ways * stretches * edge)


def test_a_halo_longer_than_a_stretch_is_refused_with_the_numbers():
    """Otherwise positions further away than the neighbour would be missing in silence."""
    run = run_on_enough_devices(Program(causal, optax.sgd(0.1), Plan("seq=8"), AXES))
    with pytest.raises(PlanError, match=r"before=3.*seq=8.*stretches of 2"):
        run.gradients(run.init(0), run.put(rows()))
    with pytest.raises(ModelError, match="before=-1"):
        Halo()(jnp.zeros((1, 4)), -1, 0)


def test_a_halo_in_stages_that_differ_in_what_they_play_is_refused():
    """Otherwise some devices would wait for sends that others never make."""
    plan = Plan("pipe=2,seq=2", attention="ulysses", pipeline="zero_bubble", fill=True, microbatches=4)
    run = run_on_enough_devices(Program(causal, optax.sgd(0.1), plan, AXES))
    with pytest.raises(PlanError, match="fill=True"):
        run.gradients(run.init(0), run.put(rows()))
