"""Layers of unequal cost on stages."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.pipeline.layers import balanced
from jaxpar.plan import Plan
from jaxpar.planner.stages import stage_layers


def slowest(costs, counts):
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return max(sum(costs[a : a + n]) for a, n in zip(starts, counts, strict=True))


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_faster_slowest_part(costs, data):
    """Otherwise the dynamic program would miss the best cut."""
    parts = data.draw(st.integers(1, len(costs)))
    found = stage_layers(costs, parts)
    assert len(found) == parts and sum(found) == len(costs) and min(found) >= 1
    every = (
        [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
        for cuts in combinations(range(1, len(costs)), parts - 1)
    )
    assert slowest(costs, found) == min(slowest(costs, counts) for counts in every)


def test_equal_layers_are_cut_evenly():
    """Otherwise all stages would store more layers than they need to."""
    assert max(stage_layers([1.0] * 30, 4)) == max(balanced(30, 4)) == 8


def test_a_heavy_layer_gets_company_last():
    """Otherwise the stage of the heavy layer would hold up the others; and the plan takes the result."""
    counts = stage_layers([4, 1, 1, 1, 1], 2)
    assert counts == (1, 4)
    assert Plan("pipe=2,data=-1", microbatches=2, stage_layers=counts).stage_layers == (1, 4)


def test_more_parts_than_layers_name_the_numbers():
    """Otherwise a part would have no layer."""
    with pytest.raises(PlanError, match="3 layers do not make 4 parts"):
        stage_layers([1, 1, 1], 4)
