"""Positions split over `seq` equal one device: some cells of docs/parity_sequence.md, and evaluation."""

import optax
import pytest

from experiments.pairwise import pairs
from experiments.sequence_share import share
from experiments.sequence_table import CASES, FACTORS, TOY, Cell, allowed, batch, cells
from jaxpar import Plan, Program
from jaxpar.testing import run_on_enough_devices

SOME = [
    Cell("weights", "ring", "seq=8", "1f1b", 0, 1, "none"),
    Cell("weights", "ulysses", "data=2,seq=4", "1f1b", 1, 2, "dots"),
    Cell("weights", "allgather", "tensor=2,seq=4", "1f1b", 0, 2, "full"),
    Cell("weights", "hybrid", "data=2,seq=4", "1f1b", 3, 2, "named:attention,mlp"),
    Cell("packed", "ring", "data=2,tensor=2,seq=2", "1f1b", 2, 2, "full"),
    Cell("GPT", "ring", "pipe=2,tensor=2,seq=2", "1f1b", 1, 4, "none"),
    Cell("two stacks", "ring", "pipe=2,tensor=2,seq=2", "zero_bubble", 0, 2, "dots"),
    Cell("two stacks", "ulysses", "data=2,pipe=2,seq=2", "gpipe", 3, 2, "named:attention,mlp"),
    Cell("1 kv head", "allgather", "data=2,pipe=2,seq=2", "zero_bubble", 2, 2, "dots"),
    Cell("bfloat16", "ring", "seq=4", "1f1b", 1, 2, "none"),
]


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_loss_and_gradients_equal_one_device(cell):
    """Otherwise training with positions split is not training this model."""
    assert share(cell) <= 1


def test_the_table_meets_every_two_choices():
    """Otherwise docs/parity_sequence.md could lose a mode or a mesh, and nobody would miss it."""
    met = set().union(*(pairs({name: getattr(cell, name) for name in FACTORS}) for cell in cells()))
    for mode in FACTORS["mode"]:
        for mesh in FACTORS["mesh"]:
            assert (("mode", mode), ("mesh", mesh)) in met
        for case in CASES:
            assert (("case", case), ("mode", mode)) in met
    assert not allowed({"mesh": "seq=8", "schedule": "zero_bubble"})


def test_evaluation_counts_every_row_of_a_ragged_batch_once():
    """Otherwise rows that fill up the last batch count, or a row counts once for every part."""
    whole = batch("5, 6, 5", 13)
    batches = [{name: x[rows] for name, x in whole.items()} for rows in (slice(0, 8), slice(8, 13))]
    found = []
    for plan in (Plan("data=1"), Plan("data=2,pipe=2,seq=2", microbatches=2)):
        run = run_on_enough_devices(Program(TOY.build, optax.sgd(0.1), plan))
        found.append(run.evaluate(run.init(0), batches))
    assert found[1]["rows"] == 13
    assert found[1] == pytest.approx(found[0], rel=1e-6)
