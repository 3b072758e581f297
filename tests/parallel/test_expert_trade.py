"""The ragged exchange equals the padded one. The CPU backend lacks it: these tests replace it by its definition."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.parallel import expert_trade
from jaxpar.parallel.expert_trade import Trade
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from tests.parity.test_experts import CONFIG, batch

DEVICES, MOST, FEATURES = 4, 5, 3


def by_definition(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as it is documented; all of it is lost where the receivers expect another size."""
    me, row = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    sources = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    for rows, first, size, there in zip(*sources, strict=True):
        here = (row >= there[me]) & (row < there[me] + size[me])
        output = jnp.where(here[:, None], rows[jnp.clip(row - there[me] + first[me], 0, len(rows) - 1)], output)
    return jnp.where(jnp.all(recv_sizes == sources[2][:, me]), output, jnp.nan)


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", by_definition)
    monkeypatch.setattr(expert_trade, "device_problems", lambda device: [])


def test_what_is_filled_arrives_and_its_gradient_comes_back(everywhere):
    """Otherwise rows land where another device's lie, or the way back takes the sizes of the way there."""
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("expert",))
    sizes = jnp.array([[5, 0, 1, 2], [0, 0, 0, 0], [3, 5, 0, 4], [1, 2, 2, 5]], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (DEVICES, DEVICES, MOST, FEATURES))
    rows *= jnp.arange(MOST)[None, None, :, None] < sizes[:, :, None, None]

    def traded(rows, sizes, ragged):
        going = sizes[0]
        trade = Trade(going, expert_trade.all_to_all(going)) if ragged else Trade()
        return (trade.back(jnp.tanh(trade(rows[0]))) * (1 + lax.axis_index("expert")))[None]

    def both(ragged):
        spec = P("expert")
        f = jax.shard_map(lambda r, s: traded(r, s, ragged), mesh=mesh, in_specs=(spec, spec), out_specs=spec)

        def loss(r):
            """Of places that are not filled there is no gradient."""
            return jnp.sum(jnp.where(rows == 0, 0.0, f(r, sizes)) ** 2)

        return f(rows, sizes), jax.grad(loss)(rows)

    for ragged, padded in zip(jax.jit(lambda: both(True))(), jax.jit(lambda: both(False))(), strict=True):
        np.testing.assert_array_equal(ragged, padded)
        assert float(jnp.abs(padded).max()) > 0.1


@pytest.mark.parametrize("mesh", ["expert=4", "expert=2,tensor=2"])
def test_a_step_is_the_same_to_the_last_bit(mesh, everywhere):
    """Otherwise a plan's exchange would be part of the model. `one token`: all to one expert, in several rounds."""
    config = replace(CONFIG, num_layers=1, num_shared_experts=0)

    def run(exchange):
        plan = jaxpar.Plan(mesh, experts=jaxpar.Dropless(exchange=exchange))
        return run_on_enough_devices(jaxpar.Program(config.build, optax.sgd(0.1), plan))

    ragged, padded = run("ragged"), run("padded")
    for kind in ("uneven", "one token"):
        found, expected = (run_loss_and_grads(r, batch(kind)) for r in (ragged, padded))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_backend_without_it_is_named():
    """Otherwise XLA refuses in the middle of a compile, in words of its own."""
    program = jaxpar.Program(CONFIG.build, optax.sgd(0.1), jaxpar.Plan(experts=jaxpar.Dropless(exchange="ragged")))
    with pytest.raises(jaxpar.PlanError, match="expert_exchange='ragged' needs GPUs, found cpu"):
        program.on(jax.devices()[:1])
