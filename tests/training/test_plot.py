"""The picture of a run."""

import json

from jaxpar.training.plot import LossPlot, draw_losses
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


def test_the_file_is_a_whole_picture(tmp_path):
    """Otherwise nobody would see a loss curve."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    LossPlot(tmp_path).on_end(make_loop())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.png")] == ["loss.png"]
