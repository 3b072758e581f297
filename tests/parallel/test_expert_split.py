"""An expert is computed on split features only where that gives the same numbers."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar import PlanError
from jaxpar.parallel.expert_split import sums_over_tensor

ROWS = jax.ShapeDtypeStruct((8, 6), jnp.float32)
WIDE, NARROW = jnp.zeros((2, 6, 4)), jnp.zeros((2, 4, 6))


def gated(rows, gate, up, down):
    return down(jax.nn.silu(gate(rows)) * up(rows))


def test_what_acts_on_every_feature_alone_is_summed_at_the_end():
    """Otherwise the parts of a sum would be taken for the whole."""
    assert sums_over_tensor(gated, ROWS, [WIDE, WIDE, NARROW], [2, 2, 1])
    assert not sums_over_tensor(gated, ROWS, [WIDE, WIDE, NARROW], [None, None, None])


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda rows, up, down: down(jax.nn.softmax(up(rows))), "reduce_max"),
        (lambda rows, up, down: jax.nn.silu(down(up(rows))), "not yet summed"),
        (lambda rows, up, down: up(rows), "its last kernel must sum over them"),
        (lambda rows, up, down: down(up(rows)) + rows, "'add' to features that are not yet summed"),
        (lambda rows, up, down: down(rows[:, :4]), "rows whose features are whole by a kernel that is split"),
        (lambda rows, up, down: down(jnp.cumsum(up(rows), axis=1)), "cumsum"),
    ],
    ids=["softmax", "after the sum", "no sum", "residual", "wrong kernel", "cumsum"],
)
def test_anything_else_is_refused(run, said):
    """Otherwise an expert's numbers would depend on `tensor`, with no error."""
    with pytest.raises(PlanError, match=said):
        sums_over_tensor(run, ROWS, [WIDE, NARROW], [2, 1])
