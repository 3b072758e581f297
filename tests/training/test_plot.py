"""The picture of a run."""

import json

import pytest

from jaxpar.training.plot import Plots, draw_curve, draw_loads, draw_losses, draw_memory, loads
from tests.training.fakes import make_loop


def test_both_losses_and_the_bigram_line_are_drawn_with_a_gap_where_a_loss_is_not_finite():
    """Otherwise the picture would leave out what it is for, or fail at the step that one wants to see."""
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 2, "validation_loss": 2.5}]
    (axes,) = draw_losses(records, bigram=2.25).axes
    assert [line.get_label() for line in axes.lines] == ["train", "validation", "bigram entropy 2.250"]
    assert [len(line.get_xdata()) for line in axes.lines[:2]] == [2, 1]


def test_a_run_without_records_draws_nothing_and_does_not_fail():
    """Otherwise a run stopped in its first step would end with an error."""
    assert not list(draw_losses([], None).axes[0].lines)


def test_every_expert_has_a_line_in_order():
    """Otherwise expert 10 would stand before expert 2, or one that is never chosen would be missing."""
    records = [{"step": step, **{f"load/{e}": 0.0 if e == 3 else 1 / 11 for e in (10, *range(10))}} for step in (1, 2)]
    assert loads(records) == [f"load/{e}" for e in range(11)]
    lines = draw_loads(records).axes[0].get_lines()
    assert [line.get_label() for line in lines[:-1]] == [f"expert {e}" for e in range(11)]
    assert list(lines[3].get_ydata()) == [0.0, 0.0]


def test_the_files_are_whole_pictures(tmp_path):
    """Otherwise nobody would see a loss curve."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, "tokens_per_second": 9.0}) + "\n")
    (tmp_path / "program.json").write_text(json.dumps({"memory": MEMORY}))
    Plots(tmp_path).on_end(make_loop())
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["loss.png", "memory.png", "speed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


MEMORY = {"parameters": 2**20, "optimizer state": 2**21, "batch": 0, "temporaries": 2**22}


def test_the_parts_of_the_memory_stand_side_by_side_and_none_hides_another():
    """Otherwise the bar would show the largest kind alone."""
    (axes,) = draw_memory(MEMORY).axes
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert ends == [(0, 1), (1, 3), (3, 3), (3, 7)]


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_long_run_is_drawn_with_as_many_points_as_a_screen_has(count):
    """Otherwise the page of a long run would be megabytes of points that lie on each other."""
    records = [{"step": i, "tokens_per_second": 1.0} for i in range(count)]
    (line,) = draw_curve(records, "tokens_per_second", "tokens/s").axes[0].lines
    assert len(line.get_xdata()) == min(count, 1493)
