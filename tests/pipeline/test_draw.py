"""A schedule as text, written and read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.pipeline import Kind, Slot, build, forward, from_table

MINE = """
tick stage 0 stage 1
  0: F0 . | .  .
     F1 . | F0 B0

  2: .  B0 | F1 B1
     .  B1 | .  .
"""


def test_a_drawing_has_a_line_for_each_tick_and_a_column_for_each_stage():
    """Otherwise one could not see which task is played when."""
    assert build("1f1b", 2, 2).draw() == "\n".join(
        [
            "tick s0    | s1",
            "  0: F0 .  | .  .",
            "  1: F1 .  | F0 B0",
            "  2: .  B0 | F1 B1",
            "  3: .  B1 | .  .",
        ]
    )


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble_v", 2)]),
    st.integers(1, 16),
    st.integers(1, 40),
    st.integers(30, 120),
    st.integers(2, 40),
)
def test_a_drawing_keeps_to_its_width_and_rows_and_says_what_it_leaves_out(schedule, p, m, width, rows):
    """Otherwise a terminal would wrap its lines, or a cut drawing be taken for the whole."""
    built = build(schedule[0], p, m, schedule[1])
    lines = built.draw(width, rows).splitlines()
    assert max(map(len, lines)) <= max(width, 50)
    ticks = [line for line in lines if line.lstrip()[0].isdigit()]
    assert len(ticks) == min(rows, len(built.ticks))
    left_out = len(built.ticks) - len(ticks)
    cut = [line for line in lines if line.startswith("... ticks")]
    assert len(cut) == (left_out > 0)
    for line in cut:
        first, last = (int(word) for word in line.split() if word.isdigit())
        assert last - first + 1 == left_out
    heading = lines[0].replace("|", " ").replace("stage ", "s").split()
    hidden = [line for line in lines if line.startswith("... stages")]
    if hidden:
        first, last = (int(word) for word in hidden[0].split() if word.isdigit())
        shown = [s for s in range(p) if not first <= s <= last]
        assert [int(word[1:]) for word in heading if word[0] == "s"] == shown and "..." in heading
    else:
        assert len(heading) == p + 1


@pytest.mark.parametrize(
    "schedule",
    [
        build("gpipe", 3, 4),
        build("1f1b", 2, 3, lanes=2),
        build("interleaved", 2, 3, 3),
        build("zero_bubble", 4, 8, fill=True),
        build("zero_bubble_v", 4, 5),
        forward(3, 4, 2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_a_drawing_is_read_back_as_the_same_schedule(schedule):
    """Otherwise one could not begin a table of one's own with a known one."""
    assert from_table(schedule.draw(), schedule.name, lanes=schedule.lanes, folded=schedule.folded) == schedule


def test_a_table_of_the_users_own_is_a_schedule():
    """Otherwise a new schedule would need a builder."""
    mine = from_table(MINE, "mine")
    assert (mine.name, mine.stages, mine.microbatches) == ("mine", 2, 2)
    assert mine.slots == (Slot(Kind.F), Slot(Kind.B))
    assert mine.ticks == build("1f1b", 2, 2).ticks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs at least one tick"),
        ("F0 X1", "tick 0, stage 0: 'X1' is not a task such as F0, B12 or W3.1, nor '.'"),
        ("F0 B0 | . .\n. . | F0 B0", "stage 0: B0 needs B0 of stage 1 from an earlier tick"),
        ("F0 .\n. B0\nB1 .", "slot 0 of the clock table must be for one kind of one lane, found B of lane 0 and F"),
        ("F0 . .\n. B0 .", "slot 2 .* found no task at all"),
        ("F0 B0\nF1 B1 W1", "tick 1 must have 1 stages of 2 slots"),
        ("F0 B0\nF2 B2", "stage 0 plays F1 0 times"),
        (build("1f1b", 2, 60).draw(), "leaves something out"),
    ],
)
def test_a_table_that_cannot_be_read_or_played_is_refused_where_it_is_wrong(text, message):
    """Otherwise one would look for a typo in a hundred lines."""
    with pytest.raises(PlanError, match=message):
        from_table(text)


def test_chunks_of_a_table_need_a_lane_each_that_is_named():
    """Otherwise a table of two stacks would run the layers of one with the weights of the other."""
    with pytest.raises(PlanError, match=r"F0\.1 is not among 1 x 1 chunks"):
        from_table("F0 B0\nF0.1 B0.1", lanes=(0,))
