"""Plans by number of devices, and what to rent."""

import optax
import pytest

import jaxpar
from jaxpar.estimate.hardware import Cluster
from jaxpar.plan import Plan
from jaxpar.planner.chart import save_bars, save_curve
from jaxpar.planner.question import Question
from jaxpar.planner.scaling import parse_devices, scale
from jaxpar.planner.search import Search
from models.llama import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=32000, num_layers=16, embed_dim=2048, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=5504
)
QUESTION = Question(
    LLAMA.build,
    optax.adamw(1e-3),
    Cluster.parse("1x8xh100"),
    jaxpar.token_shapes(128, 4096),
    Plan(precision="bfloat16"),
)


@pytest.fixture(scope="module")
def scaling():
    return scale(QUESTION, (2, 8, 16, 32), tokens=1e11, deadline_hours=250.0, price=2.0)


def test_more_devices_are_faster_and_lose_a_little(scaling):
    """Otherwise a curve would not be one."""
    speeds = [p.best.tokens_per_second for p in scaling.points]
    assert speeds == sorted(speeds)
    assert [str(p.cluster) for p in scaling.points] == ["1x2xh100", "1x8xh100", "2x8xh100", "4x8xh100"]
    assert 0.5 < scaling.points[-1].efficiency(scaling.points[0]) < 1.2


def test_the_cheapest_meets_the_deadline_and_no_other_that_does_is_cheaper(scaling):
    """Otherwise someone would pay more, or wait longer than said."""
    best = scaling.cheapest
    assert best.hours(1e11) <= 250
    assert all(p.cost(1e11) >= best.cost(1e11) for p in scaling.points if p.hours(1e11) <= 250)
    assert best.cost(1e11) == pytest.approx(best.hours(1e11) * best.devices * 2.0)
    assert str(best.cluster) in scaling.verdict and "hours of 250" in scaling.verdict


def test_a_deadline_that_none_meets_names_the_fastest(scaling):
    """Otherwise an impossible wish would be granted, or met with silence."""
    hopeless = type(scaling)(scaling.points, 1e15, 1.0)
    assert hopeless.cheapest is None and "the fastest, 4x8xh100, needs" in hopeless.verdict


def test_counts_are_read_as_ranges_and_lists():
    """Otherwise 8..1024 would be two clusters."""
    assert parse_devices("8..100") == (8, 16, 32, 64) and parse_devices("8,24") == (8, 24)
    for wrong in ("", "8..", "0..8", "16..8", "a"):
        with pytest.raises(jaxpar.ConfigError, match="needs a range"):
            parse_devices(wrong)
    with pytest.raises(jaxpar.ConfigError, match="no whole nodes of 8"):
        scale(QUESTION, (12,))


def test_pictures_are_written(scaling, tmp_path):
    """Otherwise an explanation would have no bars."""
    save_curve(scaling, tmp_path / "curve.png")
    save_bars(Search(QUESTION).run()[:3], tmp_path / "bars.svg")
    assert (tmp_path / "curve.png").stat().st_size > 1000 and "predicted GB" in (tmp_path / "bars.svg").read_text()
