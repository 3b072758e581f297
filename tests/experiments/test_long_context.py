"""The long-context experiment holds its budget on eight devices, and only there."""

import optax

from experiments.long_context import CONFIG, LENGTH, Needed, draw, measure
from jaxpar.program import Program


def test_rows_that_break_the_budget_on_one_device_fit_on_eight():
    """Otherwise the experiment would show something that a single device could do too."""
    program = Program(CONFIG.model.build, optax.adamw(1e-3), CONFIG.plan)
    assert CONFIG.data.row_length == 8 * LENGTH
    assert measure(program, 1, LENGTH).fits
    assert not measure(program, 1, 2 * LENGTH).fits
    assert measure(program, 8, 8 * LENGTH).fits


def test_the_picture_shows_every_length():
    """Otherwise a line of the plot would lack a point."""
    needed = [Needed(1, LENGTH * size, size * 2**20) for size in (1, 2, 4, 8)]
    lines = draw(needed, needed[:2]).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines[:2]] == [4, 2]
