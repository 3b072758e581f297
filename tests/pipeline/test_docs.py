"""docs/pipelines.md says what the schedules are."""

import itertools
import re
from pathlib import Path

import pytest

from jaxpar.pipeline import SCHEDULES, Schedule, build

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
ROWS = re.findall(r"^\| `(.*?)` \|.*?\| ([\d.]+)% \|.*?\| ([\d.]+) \| (\d) \|$", PAGE, re.MULTILINE)


def sends(schedule: Schedule) -> int:
    """Permutes in a tick: for F and for B, and for each direction in which a microbatch goes along the ring."""
    p = schedule.stages
    path = [stage for stage, _ in schedule.route]
    return 2 * len({(b - a + 1) % p - 1 for a, b in itertools.pairwise(path) if a != b})


@pytest.mark.parametrize(("flags", "bubble", "held", "permutes"), ROWS, ids=[row[0] for row in ROWS])
def test_the_figures_of_the_table_are_those_of_the_schedules(flags, bubble, held, permutes):
    """Otherwise one would choose a schedule by figures of another."""
    name, *rest = flags.split()
    schedule = build(name, 4, 8, 2 if "--virtual-stages" in rest else 1, fill="--fill" in rest)
    assert f"{schedule.bubble():.2%}" == f"{bubble}%"
    assert max(schedule.peak_live()) / schedule.chunks == float(held)
    assert sends(schedule) == int(permutes)


def test_the_table_has_every_schedule_and_the_drawing_is_ours():
    """Otherwise the page would describe what one cannot have."""
    assert {row[0].split()[0] for row in ROWS} == set(SCHEDULES) and len(ROWS) == 7
    assert max(build("zero_bubble", 4, 8, fill=True).peak_pending()) == 7
    assert max(build("zero_bubble", 4, 8).peak_pending()) == 4
    assert f"```text\n{build('zero_bubble', 4, 8, fill=True).draw()}\n```" in PAGE


def test_the_rest_of_the_page_holds_for_other_sizes():
    """Otherwise its formulas would be those of the example alone."""
    for p in (2, 3, 4, 8):
        for v in (2, 3):
            held = max(build("interleaved", p, 8 * p, v).peak_live()) / v
            assert held == pytest.approx(((v - 1) * p + 2 * (p - 1) + 1) / v)
        for lanes in (1, 2, 3):
            assert max(build("1f1b", p, 8 * p, lanes=lanes).peak_live()) / lanes == (lanes + 1) * p - 1
        filled = build("zero_bubble_v", p, 8 * p, fill=True)
        assert max(filled.peak_live()) / 2 == pytest.approx(p + p // 2 / 2)
