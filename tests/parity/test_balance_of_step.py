"""A balance loss over a whole step is one number, however its rows and positions are split, or it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import ConfigError, Plan, PlanError, Program
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from jaxpar.training.sample import one_device_context
from models.moe import MoEConfig, balance, balance_of_step

ROWS, LENGTH = 8, 8
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 24, "moe_mlp_dim": 12}
CONFIG = MoEConfig(61, 2, 16, **SIZES, balance="step", balance_coef=0.1)


def program(plan: Plan) -> Program:
    return Program(CONFIG.build, optax.sgd(0.1), plan)


def test_its_value_is_that_of_the_shares_over_all_tokens():
    """Otherwise rows are balanced one by one, or padding counts. Two rows that like one expert each are balanced."""
    scores = np.asarray(jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 4, 2)), axis=-1))
    chosen = np.zeros((2, 4, 2), np.float32)
    chosen[0, :, 0] = chosen[1, :3, 1] = 1
    seen = np.ones((2, 4), np.float32)
    seen[1, 3] = 0
    args = (jnp.asarray(scores), jnp.asarray(chosen), 1, jnp.asarray(seen), one_device_context(2, 4))
    share, mean = np.array([4, 3]) / 7, (scores * seen[..., None]).sum(axis=(0, 1)) / 7
    assert float(balance_of_step(*args)) == pytest.approx(2 * 2 * float(share @ mean), rel=1e-6)
    assert abs(float(balance(*args)) - float(balance_of_step(*args))) > 1e-3


@pytest.mark.parametrize("plan", [Plan("data=2,expert=2,seq=2", zero=3, remat="full")], ids=str)
def test_its_value_and_gradient_are_those_of_one_device(plan):
    """Otherwise a device balances its own rows, or the pull grows with how many devices there are.

    Tokens without weight leave nothing but the balance loss.
    """
    quiet = {**make_batch("packed", ROWS, 61, LENGTH), "weights": np.zeros((ROWS, LENGTH), np.float32)}
    found, alone = (run_loss_and_grads(run_on_enough_devices(program(p)), quiet) for p in (plan, Plan("data=1")))
    assert not compare(*found, *alone)
    assert np.abs(found[1]["blocks.experts.router.kernel"]).max() > 1e-3 and found[0] > 0.09


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan("data=2", microbatches=2), "microbatches=2, pipe=1"),
        (Plan("data=1,pipe=2", microbatches=2), "microbatches=2, pipe=2"),
    ],
)
def test_a_step_in_parts_is_refused(plan, said):
    """Otherwise each microbatch is balanced by itself, and the loss depends on how many there are."""
    with pytest.raises(PlanError, match=rf"blocks\.experts .*{said} .*set microbatches=1 and pipe=1.*balance='row'"):
        program(plan).validate(devices=2)


def test_another_word_for_where_to_balance_is_refused():
    """Otherwise a misspelled one would be balanced by row."""
    with pytest.raises(ConfigError, match="balance='batch': needs 'row' or 'step'"):
        MoEConfig(61, 2, 16, **SIZES, balance="batch")
