"""The pipeline benchmark counts what a stage executes, also what is masked, and only that."""

import jax
import pytest

from experiments.bench.pipeline import SCHEDULES, STAGES, Case, Step, formula
from jaxpar.pipeline import Costs

TINY = Case(embed=16, vocab=208, positions=8)


@pytest.fixture(scope="module")
def one() -> Step:
    return Step(TINY, None)


@pytest.mark.parametrize("name", ["interleaved, v=2", "zero_bubble, fill"])
def test_counted_bubbles_are_those_of_the_table_and_the_head_is_shared_out(name, one):
    """Otherwise the benchmark would count conditions that do not hold, or miss what is computed in vain."""
    assert jax.device_count() >= STAGES
    step = Step(TINY, SCHEDULES[name])
    counted = step.work.layers / (one.work.layers / STAGES) - 1
    table = step.run.plan.schedule(STAGES).bubble(Costs())
    assert table == pytest.approx(formula(SCHEDULES[name], STAGES, TINY.microbatches))
    # F, B and W are equally long but for attention, which has no weights: B alone has its gradients.
    assert counted == pytest.approx(table, abs=1e-9 if "zero" not in name else 0.05)
    assert step.work.head == pytest.approx(one.work.head / STAGES)
