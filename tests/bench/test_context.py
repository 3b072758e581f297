"""The benchmark of sequence parallelism compares the same numbers, and counts what really runs."""

import jax.numpy as jnp
import numpy as np

import jaxpar
from experiments.bench.context import ORDERS, Case, RingAttention, measure_modes
from models.llama import LlamaConfig

TINY = Case(LlamaConfig(64, 1, 32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64), positions=64)


def test_split_and_whole_rows_are_compared_in_pairs():
    """Otherwise the ratio would be of other work, or of other minutes; the losses are compared inside."""
    plan = jaxpar.Plan("seq=4", attention=jaxpar.Hybrid(2))
    assert len(measure_modes(TINY, (plan,), 0.0)[plan].plain) == 5


def test_visits_are_those_of_the_order():
    """Otherwise the table would show a balance that the program does not have."""
    rings = {name: RingAttention(TINY, layout(4, 1), 64, block=8) for name, layout in ORDERS.items()}
    visits = {name: ring.visits().tolist() for name, ring in rings.items()}
    assert visits == {"zigzag": [9, 9, 9, 9], "natural": [3, 7, 11, 15]}
    assert rings["zigzag"].share(9) == 9 * 8 * 8 / (64 * 64 / 2 / 4)
    # Both orders attend to the same, each at its own places.
    found = {name: np.asarray(ring.forward(*ring.arrays)) for name, ring in rings.items()}
    order = rings["zigzag"].layout.order(64).reshape(-1)
    np.testing.assert_allclose(found["zigzag"], found["natural"][:, jnp.asarray(order)], atol=1e-5)
