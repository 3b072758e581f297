"""Every schedule can be played for every number of stages and microbatches, and costs what its formula says."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.pipeline import SCHEDULES, Costs, Kind, build, forward, legal_microbatches
from jaxpar.pipeline.zero_bubble import zero_bubble
from jaxpar.pipeline.zero_bubble_v import zero_bubble_v
from tests.pipeline.player import playable

STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (*range(1, 13), 32)
COSTS = Costs(forward=3.0, backward=5.0, weight=2.0)
F, B, W = COSTS.forward, COSTS.backward, COSTS.weight


def idle(schedule) -> float:
    """Time in which each device waits in a step."""
    return schedule.bubble(COSTS) * schedule.microbatches * (F + B + W)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_1f1b_waits_as_its_formula_says_and_holds_twice_the_distance_to_the_end(p, lanes):
    """Otherwise the plan's memory and speed would be estimated for another schedule."""
    for m in MICROBATCHES:
        schedule = build("1f1b", p, m, lanes=lanes)
        assert idle(schedule) == pytest.approx((p - 1) * (F + B + W))
        if lanes == 1:
            assert schedule.peak_live() == tuple(min(m, 2 * (p - 1 - s) + 1) for s in range(p))
        elif p == 1:
            assert schedule.peak_live() == (lanes,) and len(schedule.ticks) == m
        elif m >= 2 * p * lanes:
            assert schedule.peak_live() == tuple(lanes * (p * (lanes + 1) - 2 * s - 1) for s in range(p))


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_gpipe_waits_as_long_as_1f1b_and_holds_every_microbatch(p, lanes):
    """Otherwise the two would not differ in memory alone, which is what one is told."""
    for m in MICROBATCHES:
        schedule = build("gpipe", p, m, lanes=lanes)
        assert idle(schedule) == pytest.approx((p - 1) * (F + B + W))
        assert schedule.peak_live() == (m * lanes,) * p
        when = schedule.when()
        first = min(t for (_, task), (t, _) in when.items() if task.kind == Kind.B)
        assert first == 1 + max(t for (_, task), (t, _) in when.items() if task.kind == Kind.F)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_fills_the_pipeline_in_a_share_of_the_time_for_any_microbatch_count(p, v):
    """Otherwise virtual stages would not pay, or counts that p does not divide would be refused or padded."""
    for m in MICROBATCHES:
        schedule = build("interleaved", p, m, v)
        assert idle(schedule) == pytest.approx(((p - 1) + (v - 1) * max(p - m, 0)) / v * (F + B + W))
        largest_group = -(-m // max(m // p, 1)) if m >= p else p
        expected = tuple(min(m * v, (v - 1) * largest_group + 2 * (p - 1 - s) + 1) for s in range(p))
        if m >= p:
            assert schedule.peak_live() == expected
        assert all(held <= most for held, most in zip(schedule.peak_live(), expected, strict=True))


def test_interleaved_with_one_virtual_stage_is_1f1b():
    """Otherwise one of the two builders would be wrong."""
    for p in STAGES:
        for m in MICROBATCHES:
            one, other = build("1f1b", p, m), build("interleaved", p, m, 1)
            assert (one.ticks, one.slots, one.lanes) == (other.ticks, other.slots, other.lanes)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_zero_bubble_never_waits_for_a_weight_gradient(p, lanes):
    """Otherwise splitting the backward would cost memory and save nothing."""
    for m in MICROBATCHES:
        schedule = build("zero_bubble", p, m, lanes=lanes)
        assert idle(schedule) == pytest.approx((p - 1) * (F + B))
        assert_weights_are_uniform(schedule)
        if lanes == 1:
            assert schedule.peak_live() == tuple(min(m, 2 * p - 1 - s) for s in range(p))
            assert schedule.peak_pending() == tuple(min(m, s + 1) for s in range(p))
            when = schedule.when()
            played = {(t, task.microbatch) for (_, task), (t, _) in when.items() if task.kind == Kind.W}
            assert played == {(j + 2 * p - 2, j) for j in range(m)}


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_zero_bubble_fills_what_the_end_of_the_pipeline_leaves_idle(p, lanes):
    """Otherwise `fill` would promise time that it does not save."""
    for m in [m for m in (*MICROBATCHES, 48) if m in legal_microbatches("zero_bubble", p, lanes=lanes, fill=True)]:
        schedule = build("zero_bubble", p, m, lanes=lanes, fill=True)
        assert idle(schedule) == pytest.approx((p - 1) * (F + B - W))
        assert_weights_are_uniform(schedule)
        if lanes == 1:
            assert schedule.peak_live() == (2 * p - 1,) * p
            assert schedule.peak_pending() == tuple(min(2 * s + 2, 2 * p - 1) for s in range(p))


@pytest.mark.parametrize("p", STAGES)
def test_zero_bubble_v_holds_half_of_what_1f1b_holds(p):
    """Otherwise the V would only be a more complicated 1F1B. A chunk is half a stage: 2 p chunks are p microbatches."""
    for m in MICROBATCHES:
        schedule = build("zero_bubble_v", p, m)
        assert idle(schedule) == pytest.approx((p - 1) * (F + B))
        assert max(schedule.peak_live()) == min(2 * m, 2 * p)
        assert max(schedule.peak_pending()) <= (p + 1) // 2
        assert_weights_are_uniform(schedule)
        if m in legal_microbatches("zero_bubble_v", p, fill=True):
            filled = build("zero_bubble_v", p, m, fill=True)
            assert idle(filled) == pytest.approx((p - 1) * (F + B - W))
            assert max(filled.peak_live()) == p + min(m, p + p // 2)
            assert max(filled.peak_pending()) <= p
            assert_weights_are_uniform(filled)


def assert_weights_are_uniform(schedule):
    """All stages play a W in the same W slots: none waits there."""
    for tick in schedule.ticks:
        for i, slot in enumerate(schedule.slots):
            if slot.kind == Kind.W:
                assert len({row[i] is None for row in tick}) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 10])
def test_fewer_microbatches_than_stages_and_odd_counts_are_played(name, m):
    """Otherwise a stage would wait for a message that is never sent, or legal counts would be refused."""
    schedule = build(name, 4, m, 2 if name == "interleaved" else 1)
    assert playable(schedule)


@pytest.mark.parametrize(
    ("name", "p", "lanes", "least"),
    [("zero_bubble", 4, 1, 7), ("zero_bubble", 2, 3, 11), ("zero_bubble_v", 5, 1, 5), ("zero_bubble", 1, 1, 1)],
)
def test_a_count_that_is_too_small_to_fill_is_refused_with_the_nearest_legal_ones(name, p, lanes, least):
    """Otherwise one would have to search for a count that works."""
    assert legal_microbatches(name, p, lanes=lanes, fill=True).start == least
    build(name, p, least, lanes=lanes, fill=True)
    for m in range(least):
        with pytest.raises(PlanError, match=f"nearest legal counts are {least}, {least + 1}, {least + 2}"):
            build(name, p, m, lanes=lanes, fill=True)


def test_the_rule_of_fill_is_as_wide_as_it_can_be():
    """Otherwise counts would be refused that save as much."""
    for p in (2, 3, 4, 8):
        assert idle(zero_bubble(p, 2 * p - 2, fill=True)) > (p - 1) * (F + B - W) + 1e-6
        assert idle(zero_bubble_v(p, p - 1, fill=True)) > (p - 1) * (F + B - W) + 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 4, 8), "did you mean '1f1b'"),
        (("dualpipe", 4, 8), "schedules: gpipe, 1f1b"),
        (("1f1b", 0, 8), "stages must be at least 1, found 0"),
        (("1f1b", 4, 0), "needs at least 1 microbatches, found 0; the nearest legal counts are 1, 2, 3"),
        (("interleaved", 4, 8, 0), "virtual_stages must be at least 1, found 0"),
        (("1f1b", 4, 8, 2), "schedule '1f1b' has 1 virtual stage, found 2: take 'interleaved'"),
        (("zero_bubble_v", 4, 8, 3), "has 2 virtual stages, found 3"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(arguments, message):
    """Otherwise a typo would be a traceback deep in a builder, or another schedule."""
    with pytest.raises(PlanError, match=message):
        build(*arguments)


def test_lanes_and_fill_are_refused_where_a_schedule_has_none():
    """Otherwise they would be left out without a word."""
    with pytest.raises(PlanError, match="has one lane, found 2 stacks") as error:
        build("interleaved", 4, 8, 2, lanes=2, fill=True)
    assert len(error.value.problems) == 2 and "no W tasks" in error.value.problems[1]


legal = st.fixed_dictionaries(
    {
        "name": st.sampled_from(SCHEDULES),
        "stages": st.integers(1, 9),
        "microbatches": st.integers(1, 30),
        "virtual_stages": st.integers(1, 4),
        "lanes": st.integers(1, 3),
        "fill": st.booleans(),
    }
)


@settings(deadline=None, max_examples=150)
@given(legal)
def test_what_is_built_can_be_played_and_the_rest_is_refused(drawn):
    """Otherwise a hole in the grid above would be a hang on devices."""
    try:
        schedule = build(**drawn)
    except PlanError:
        return
    assert playable(schedule)
    assert schedule.microbatches == drawn["microbatches"] and schedule.stages == drawn["stages"]


@pytest.mark.parametrize("p", STAGES)
def test_a_forward_alone_takes_any_count_and_fills_the_pipeline_as_training_does(p):
    """Otherwise evaluation would be refused for batches that training takes."""
    for m in MICROBATCHES:
        plain, lanes, chunks = forward(p, m), forward(p, m, lanes=3), forward(p, m, 2)
        folded = forward(p, m, folded=True)
        assert all(playable(schedule) for schedule in (plain, lanes, chunks, folded))
        assert plain.bubble() == pytest.approx((p - 1) / m) == lanes.bubble() == folded.bubble()
        assert chunks.bubble() == pytest.approx(((p - 1) + max(p - m, 0)) / (2 * m))
        assert plain.kinds == (Kind.F,) and plain.peak_live() == (1,) * p
        assert plain.peak_pending() == (0,) * p
    with pytest.raises(PlanError, match="at least 1 microbatch"):
        forward(p, 0)
    with pytest.raises(PlanError, match="one lane"):
        forward(p, 4, 2, lanes=2)


def test_a_large_schedule_is_built_and_checked_in_seconds():
    """Otherwise each start of a large run would wait for its table: 131,072 tasks."""
    start = time.monotonic()
    build("interleaved", 16, 256, 4)
    assert time.monotonic() - start < 20.0
