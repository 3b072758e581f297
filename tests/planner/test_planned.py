"""What the planner offers holds: it fits when the compiler is asked, and equals one device when it is run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.planned_table import draws, outcome


@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_what_is_offered_fits_when_compiled_and_equals_one_device(seed):
    """Otherwise a person rents a cluster for a plan that does not fit, or that learns something else.

    `python -m experiments.planned_plans` asks more, on up to 24 devices.
    """
    found = outcome(next(draws(seed, (6, 8))))
    assert not found.wrong, found.wrong
