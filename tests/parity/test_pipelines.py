"""Every schedule with every other choice equals one device: a part of the table of pipelines that fits a test run."""

import itertools

import pytest

from experiments.pairwise import pairs, pairwise
from experiments.pipeline_measure import share
from experiments.pipeline_table import CASES, FACTORS, MICROBATCHES, SCHEDULES, STAGES, Cell, allowed, cells

pytestmark = pytest.mark.timeout(180)

# Models, ZeRO stages and layouts take turns.
COVER = pairwise(
    {"schedule": list(SCHEDULES), "mesh": ["data=2,pipe=2,tensor=2", "data=2,pipe=4"], "microbatches": [3, 8]},
    lambda row: "fill" not in row["schedule"] or row["microbatches"] == 8,
)
TURNS = itertools.cycle(case for case in CASES if case not in ("alone", "within node", "two stacks", "tied"))
REMAT = itertools.cycle(["none", "dots", "full"])
PLAYED = [
    Cell(next(TURNS), **row, zero=3 - i % 4, remat=next(REMAT), norms="tensor" in row["mesh"] and i % 4 == 0)
    for i, row in enumerate(COVER)
    if row["schedule"] != "interleaved"
]
OTHERS = [
    Cell("two stacks", "1f1b", "data=2,pipe=4", 3, zero=2),
    Cell("two stacks", "zero_bubble", "data=2,pipe=2,tensor=2", 8, zero=3, remat="named:attention,mlp"),
    Cell("tied", "interleaved", "data=2,pipe=2,tensor=2", 3, virtual_stages=2, zero=3),
    Cell("stage_layers", "interleaved", "data=2,pipe=4", 8, virtual_stages=2, zero=1, remat="full"),
    Cell("within node", "zero_bubble_v", "data=4,pipe=2", 2, zero=3),
]


@pytest.mark.parametrize("cell", PLAYED + OTHERS, ids=str)
def test_loss_and_gradients_equal_one_device(cell):
    """Otherwise training in this pipeline is not training this model."""
    found = share(cell)
    assert found is not None and found <= 1, (cell, found)


def test_the_cover_has_every_schedule_and_every_case():
    """Otherwise a model or a schedule would be tested by nobody."""
    assert {cell.schedule for cell in PLAYED + OTHERS} == set(SCHEDULES)
    assert {cell.case for cell in PLAYED + OTHERS} == set(CASES) - {"alone"}


def test_the_table_has_every_pair_of_choices_and_every_grid():
    """Otherwise docs/parity_pipelines.md could lose a schedule, and nobody would miss it."""
    table = list(cells())
    composed = [{name: getattr(cell, name) for name in FACTORS} for cell in table if cell.case != "alone"]
    possible = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    assert set().union(*map(pairs, composed)) == set().union(*map(pairs, filter(allowed, possible)))
    alone = {(cell.schedule, cell.mesh, cell.microbatches) for cell in table if cell.case == "alone"}
    assert len(table) == len(set(table)) and len(alone) == len(SCHEDULES) * len(STAGES) * len(MICROBATCHES)
