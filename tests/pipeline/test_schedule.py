"""`validate` accepts what can be played and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.pipeline import Costs, Kind, Schedule, Slot, Task, build, from_table
from tests.pipeline.player import playable

BUILT = [
    build("gpipe", 3, 2),
    build("1f1b", 3, 4),
    build("1f1b", 2, 3, lanes=2),
    build("interleaved", 2, 4, 2),
    build("zero_bubble", 2, 4, fill=True),
    build("zero_bubble_v", 2, 3),
]


def accepts(schedule) -> bool:
    try:
        schedule.validate()
    except PlanError:
        return False
    return True


def with_entry(schedule, where, task):
    """The schedule with another task, or none, at `(tick, stage, slot)`."""
    tasks = {(t, s, i): found for t, s, i, found in schedule.entries()}
    tasks.pop(where, None)
    if task is not None:
        tasks[where] = task
    return rebuilt(schedule, tasks)


def rebuilt(schedule, tasks):
    arguments = (schedule.name, schedule.stages, schedule.microbatches, schedule.lanes, schedule.slots)
    return Schedule.from_tasks(*arguments, tasks, schedule.folded)


@pytest.mark.parametrize("schedule", BUILT, ids=lambda schedule: schedule.name)
def test_a_dropped_or_doubled_task_is_refused_by_name(schedule):
    """Otherwise a microbatch would be left out of the gradient, or be in it twice."""
    for t, stage, slot, task in schedule.entries():
        with pytest.raises(PlanError, match=f"stage {stage} plays {task} 0 times"):
            with_entry(schedule, (t, stage, slot), None).validate()
        with pytest.raises(PlanError, match=f"stage {stage} plays {task} 2 times"):
            with_entry(schedule, (len(schedule.ticks), stage, slot), task).validate()


@pytest.mark.parametrize("schedule", BUILT, ids=lambda schedule: schedule.name)
def test_a_stage_that_begins_one_tick_early_is_refused(schedule):
    """Otherwise it would read what has not arrived."""
    for stage in range(1, schedule.stages):
        early = {(t + (s != stage), s, i): task for t, s, i, task in schedule.entries()}
        with pytest.raises(PlanError, match=f"stage {stage}: F0 needs F0 of stage {stage - 1} from an earlier tick"):
            rebuilt(schedule, early).validate()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_two_tasks_that_change_places_are_accepted_only_if_they_can_be_played(data):
    """Otherwise a table of the user's own would hang, or compute something else."""
    schedule = data.draw(st.sampled_from(BUILT))
    stage, slot = data.draw(st.integers(0, schedule.stages - 1)), data.draw(st.integers(0, len(schedule.slots) - 1))
    ticks = st.integers(0, len(schedule.ticks) - 1)
    one, other = data.draw(ticks), data.draw(ticks)
    first, second = schedule.ticks[one][stage][slot], schedule.ticks[other][stage][slot]
    changed = with_entry(with_entry(schedule, (one, stage, slot), second), (other, stage, slot), first)
    assert accepts(changed) == playable(changed)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_task_put_anywhere_else_is_accepted_only_if_it_can_be_played(data):
    """Otherwise a task of another kind, chunk or lane would be run with the weights at hand."""
    schedule = data.draw(st.sampled_from(BUILT))
    where = (
        data.draw(st.integers(0, len(schedule.ticks))),
        data.draw(st.integers(0, schedule.stages - 1)),
        data.draw(st.integers(0, len(schedule.slots) - 1)),
    )
    draw = st.builds(Task, st.sampled_from(Kind), st.integers(0, 4), st.integers(0, 2))
    changed = with_entry(schedule, where, data.draw(draw))
    assert accepts(changed) == playable(changed)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("B0 F0", "B0 needs F0 of the same stage before it"),
        ("F0 W0 B0", "W0 needs B0 of the same stage before it"),
    ],
)
def test_slots_of_a_tick_are_played_in_their_order(table, problem):
    """Otherwise a backward would read what its forward has not yet written."""
    with pytest.raises(PlanError, match=f"tick 0, stage 0: {problem}"):
        from_table(table)


def test_a_chunk_in_the_slot_of_another_lane_is_refused():
    """Otherwise the layers of one stack would be run with the weights of another."""
    schedule = build("1f1b", 1, 1, lanes=2)
    moved = {(t, s, 0 if task.kind == Kind.F else i): task for t, s, i, task in schedule.entries()}
    with pytest.raises(PlanError, match=r"F0\.1 does not fit the slot F of lane 0"):
        rebuilt(schedule, moved).validate()


def test_all_problems_of_a_table_are_told_at_once():
    """Otherwise one would mend a table line by line."""
    with pytest.raises(PlanError) as error:
        rebuilt(BUILT[1], {}).validate()
    assert "and 4 more" in str(error.value)


def test_a_table_whose_rows_differ_in_length_is_refused():
    """Otherwise an index error would be all that the user sees."""
    with pytest.raises(PlanError, match="tick 1 must have 2 stages of 2 slots"):
        from_table("F0 B0 | . .\nF1 B1")


def test_a_slot_lasts_as_long_as_its_longest_task():
    """Otherwise a W that fills a shorter F slot would seem to be free."""
    schedule = build("zero_bubble", 2, 3, fill=True)
    costs = Costs(forward=1.0, backward=1.0, weight=5.0)
    filled = [t for t, _, slot, task in schedule.entries() if task.kind == Kind.W and slot == 0]
    assert filled and all(schedule.durations(costs)[t][0] == 5.0 for t in filled)
    assert schedule.time(costs) == sum(map(sum, schedule.durations(costs)))


def test_a_microbatch_on_one_stage_is_held_for_one_tick():
    """Otherwise memory would be estimated for a pipeline where there is none."""
    one = from_table("F0 B0\nF1 B1")
    assert (one.peak_live(), one.bubble(), one.slots) == ((1,), 0.0, (Slot(Kind.F), Slot(Kind.B)))
