"""Every plan equals one device: a cover of the table of docs/parity.md in which every two choices meet."""

import itertools
from dataclasses import replace

import pytest

from experiments.pairwise import pairs, pairwise
from experiments.parity_table import CASES, MICROBATCHES, ZERO, cells
from jaxpar import Plan
from models.llama import LlamaConfig
from tests.parity.references import assert_equals_one_device

# Cases of one model and one set of arrays share a program; a scan is as right with 3 layers as with 8.
MODELS: dict[str, tuple[LlamaConfig, list[str]]] = {}
for case, (config, weights) in CASES.items():
    name = case if case in ("vocab 61", "embed 36", "tied", "packed") else "base"
    MODELS.setdefault(name, (replace(config, num_layers=3), []))[1].append(weights)

FACTORS = {
    "model": list(MODELS),
    "mesh": ["data=8", "data=4,tensor=2", "data=2,tensor=4", "tensor=8"],
    "zero": list(ZERO),
    "microbatches": list(MICROBATCHES),
    "kv_heads": [4, 1],
}
COVER = pairwise(FACTORS)
ROWS = 32  # every plan can cut them: one program on one device serves all plans


@pytest.mark.parametrize("row", COVER, ids=lambda row: " ".join(map(str, row.values())))
def test_loss_and_gradients_equal_one_device(row):
    """Otherwise training under this plan is not training this model."""
    config, weights = MODELS[row["model"]]
    plan = Plan(row["mesh"], zero=row["zero"], microbatches=row["microbatches"])
    assert_equals_one_device(replace(config, num_kv_heads=row["kv_heads"]), plan, weights, ROWS)


def test_the_cover_meets_every_pair_of_choices():
    """Otherwise a strategy that fails only together with another would pass."""
    met = set().union(*map(pairs, COVER))
    for (a, values), (b, others) in itertools.combinations(FACTORS.items(), 2):
        assert all(((a, x), (b, y)) in met for x in values for y in others)


def test_the_table_has_every_plan_on_every_case():
    """Otherwise docs/parity.md could lose a column, and nobody would miss it."""
    table = list(cells())
    assert len(table) == len(set(table)) == 5 * 8 * 4 * 3
    assert all(cell.rows % (cell.plan.shape.data * cell.microbatches) == 0 for cell in table)
