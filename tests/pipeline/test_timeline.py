"""A schedule as picture and as trace."""

import itertools
import json

import pytest

from jaxpar.pipeline import Costs, Kind, build
from jaxpar.pipeline.timeline import boxes, draw_timeline, save_timeline, trace

SCHEDULES = [
    build("1f1b", 4, 6),
    build("1f1b", 2, 4, lanes=3),
    build("interleaved", 3, 5, 2),
    build("zero_bubble", 3, 6, fill=True),
    build("zero_bubble_v", 4, 5),
]
COSTS = Costs(forward=1.0, backward=1.5, weight=0.5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_boxes_of_a_stage_follow_each_other_and_come_after_what_they_need(schedule):
    """Otherwise the picture would show a schedule that no device could play."""
    found = list(boxes(schedule, COSTS))
    span = {(stage, task): (start, start + duration) for _, stage, task, start, duration in found}
    assert len(span) == len(found) == len(list(schedule.entries()))
    assert max(end for _, end in span.values()) == pytest.approx(schedule.time(COSTS))
    for stage in range(schedule.stages):
        own = sorted(times for (s, _), times in span.items() if s == stage)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
        work = sum(end - start for start, end in own)
        assert work == pytest.approx(schedule.microbatches * (COSTS.forward + COSTS.backward + COSTS.weight))
    for (stage, task), (start, _) in span.items():
        q = schedule.place[stage, task.chunk]
        if task.kind == Kind.F and q:
            before = schedule.route[q - 1]
            assert any(
                s == before[0] and t.kind == Kind.F and (t.microbatch, t.chunk) == (task.microbatch, before[1])
                for (s, t), (_, end) in span.items()
                if end <= start + 1e-9
            )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_trace_has_a_track_for_each_stage_and_an_event_for_each_task(schedule):
    """Otherwise Perfetto would show tasks on the wrong device, or none."""
    events = json.loads(json.dumps(trace(schedule, COSTS)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {s: f"stage {s}" for s in range(schedule.stages)}
    played = [e for e in events if e["ph"] == "X"]
    assert {(e["tid"], e["name"]) for e in played} == {(s, str(task)) for _, s, _, task in schedule.entries()}
    assert max(e["ts"] + e["dur"] for e in played) == pytest.approx(schedule.time(COSTS) * 1000)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_picture_names_its_stages_and_puts_microbatches_in_the_boxes(schedule):
    """Otherwise one could not tell which box is which."""
    axes = draw_timeline(schedule).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"stage {s}" for s in range(schedule.stages)]
    assert len(axes.texts) == len(list(schedule.entries()))
    figure = axes.figure
    width = figure.get_window_extent().width
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= width
    assert len({color for box in axes.collections for color in map(tuple, box.get_facecolor())}) == len(
        {(task.kind, task.chunk) for _, _, _, task in schedule.entries()}
    )


def test_numbers_are_left_out_where_boxes_are_too_narrow():
    """Otherwise a large schedule would be drawn in black."""
    assert not draw_timeline(build("interleaved", 4, 128, 4)).axes[0].texts


@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".json", b"{")])
def test_a_file_is_of_the_kind_of_its_ending_and_always_the_same(suffix, begins, tmp_path):
    """Otherwise a picture under version control would change with every run."""
    paths = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
    for path in paths:
        save_timeline(SCHEDULES[0], path)
    one, two = (path.read_bytes() for path in paths)
    assert one == two and one.startswith(begins)
