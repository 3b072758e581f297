"""The benchmarks compare what is comparable: same numbers, same work."""

import numpy as np
import pytest

import jaxpar
from experiments.bench import offload
from experiments.bench.depth import measure
from experiments.bench.overhead import Case, Contest, Timing

TINY = dict(layers=2, embed=32, vocab=64, rows=4, positions=16)


@pytest.mark.parametrize("mesh", ["data=1", "data=4,tensor=2"])
def test_jaxpar_and_plain_step_have_equal_gradients_and_work(mesh):
    """Otherwise the ratio of their times would compare two different things."""
    Contest(Case(mesh, **TINY)).check()


def test_the_deep_program_is_as_long_as_the_shallow_one():
    """Otherwise compile time would grow with depth, whatever this machine's clock says."""
    assert measure(Case("data=4,tensor=2", **TINY), jaxpar.Plan(mesh="data=4,tensor=2"), 1, (2, 7)).shape == (1, 2)


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    """Otherwise the interval would measure the neighbours on the machine."""
    load = np.linspace(1.0, 5.0, 20)
    timing = Timing(jaxpar=1.02 * load, plain=load)
    assert timing.interval() == pytest.approx((1.02, 1.02))


def test_steps_with_and_without_offload_are_compared_in_pairs():
    """Otherwise the ratio would compare one minute of the machine with another; the losses are compared inside."""
    timings = offload.measure(Case("data=1", **TINY), 0)
    assert {kind: len(wall.plain) for kind, (wall, _) in timings.items()} == dict.fromkeys(offload.KINDS, 5)
    assert all((t.plain > 0).all() and (t.jaxpar > 0).all() for clocks in timings.values() for t in clocks)
