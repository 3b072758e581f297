"""The order in which each stage plays its tasks, against orders that others have published."""

import pytest

from jaxpar.pipeline import Costs, Kind, build
from tests.pipeline import published
from tests.pipeline.player import asynchronous_time, most_held, orders


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (build("gpipe", 4, 8), published.GPIPE_4_8),
        (build("interleaved", 4, 8, 2), published.INTERLEAVED_4_8_2),
        (build("interleaved", 2, 4, 2), published.INTERLEAVED_2_4_2),
    ],
    ids=["gpipe", "interleaved", "interleaved of 2 stages"],
)
def test_gpipe_and_interleaved_play_the_published_order(schedule, rows):
    """Otherwise their names would promise what the field does not mean by them."""
    assert orders(schedule) == published.parsed(rows)
    held = tuple(most_held(order) for order in published.parsed(rows).values())
    assert schedule.peak_live() == held


@pytest.mark.parametrize(("p", "m", "rows"), [(4, 8, published.ONE_F_ONE_B_4_8), (2, 3, published.ONE_F_ONE_B_2_3)])
def test_1f1b_in_lockstep_runs_further_ahead_than_the_published_one(p, m, rows):
    """F and B each in the published order; but a message takes a tick, in which an F and a B are played, and so stage s
    plays 2 (p - 1 - s) forwards before its first pair where the published one plays p - 1 - s: docs/pipelines.md."""
    ours, theirs = orders(build("1f1b", p, m)), published.parsed(rows)
    for stage in range(p):
        for kind in (Kind.F, Kind.B):
            assert [t for t in ours[stage] if t.kind == kind] == [t for t in theirs[stage] if t.kind == kind]
        ahead = 2 * (p - 1 - stage) + 1, p - stage
        assert [[t.kind for t in order[stage]].index(Kind.B) for order in (ours, theirs)] == [*ahead]
        assert (most_held(ours[stage]), most_held(theirs[stage])) == ahead
    assert ours[p - 1] == theirs[p - 1]


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (build("gpipe", 4, 8), published.GPIPE_4_8),
        (build("1f1b", 4, 8), published.ONE_F_ONE_B_4_8),
        (build("interleaved", 4, 8, 2), published.INTERLEAVED_4_8_2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (2.0, 3.5)])
def test_lockstep_takes_as_long_as_stages_at_their_own_pace(schedule, rows, forward, backward):
    """Otherwise docs/pipelines.md would be wrong in saying that lockstep costs memory and no time."""
    time = asynchronous_time(published.parsed(rows), schedule.chunks, forward, backward)
    assert schedule.time(Costs(forward, backward - 0.5, 0.5)) == pytest.approx(time)


def test_groups_of_any_size_are_those_of_the_published_table():
    """Otherwise microbatches that p does not divide would be played in an order of our own."""
    first = [(t.microbatch, t.chunk) for t in orders(build("interleaved", 2, 5, 2))[0] if t.kind == Kind.F]
    assert first == published.SCHEDULE_TABLE
