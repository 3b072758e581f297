"""Published layouts beside the planner's."""

import pytest

from experiments.bench.plans import CLOSE, compare, llama_405b, markdown, megatron, seventy
from jaxpar.planner.search import Search


def test_the_trillion_parameter_layout_of_megatron_is_close_to_the_best():
    """Otherwise either the planner or the published layout would be far from the best, and nobody would say why."""
    largest = [*megatron()][-1]
    found = compare(largest)
    assert abs(found.behind) <= CLOSE
    assert largest.plan.mesh in markdown([found])


def test_a_published_plan_that_is_behind_says_by_which_parts():
    """Otherwise a better plan would be a claim without a reason."""
    found = compare(next(p for p in megatron() if p.name.startswith("GPT 18.4B")))
    assert found.behind > CLOSE and found.why.startswith("tensor +")


@pytest.mark.parametrize("published", [*megatron(), *llama_405b(), *seventy()], ids=lambda p: p.name)
def test_published_plans_are_legal_ones_of_jaxpar(published):
    """Otherwise they could not be compared, nor run."""
    assert Search(published.question(published.system)).evaluate(published.plan).time.total > 0
