"""Trip counts read off a loop's condition, when XLA prints none."""

import pytest

from jaxpar.estimate.hlo_text import parse_module
from jaxpar.estimate.loops import trip_count

TEXT = """HloModule m

%add_step (i: s32[]) -> s32[] {{
  %i = s32[] parameter(0)
  %step = s32[] constant({step})
  ROOT %next = s32[] add(%i, %step)
}}

%body (t: (f32[4], s32[], s32[])) -> (f32[4], s32[], s32[]) {{
  %t = (f32[4]{{0}}, s32[], s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%t), index=0
  %counter = s32[] get-tuple-element(%t), index=1
  %limit = s32[] get-tuple-element(%t), index=2
  %fused = s32[] fusion(%counter), kind=kLoop, calls=%add_step
  ROOT %out = (f32[4]{{0}}, s32[], s32[]) tuple(%x, %fused, %limit)
}}

%condition (u: (f32[4], s32[], s32[])) -> pred[] {{
  %u = (f32[4]{{0}}, s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%u), index=1
  %n = s32[] get-tuple-element(%u), index=2
  %c = s32[] constant({bound})
  %ahead = s32[] add(%i, %c)
  ROOT %test = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (x: f32[4], given: s32[]) -> (f32[4], s32[], s32[]) {{
  %x = f32[4]{{0}} parameter(0)
  %given = s32[] parameter(1)
  %start = s32[] constant({start})
  %limit = s32[] constant({bound})
  %init = (f32[4]{{0}}, s32[], s32[]) tuple(%x, {init}, %limit)
  ROOT %loop = (f32[4]{{0}}, s32[], s32[]) while(%init), condition=%condition, body=%body
}}
"""


def trips(start, bound, step, direction, *, compared="%i, %c", init="%start"):
    text = TEXT.format(start=start, bound=bound, step=step, direction=direction, compared=compared, init=init)
    module = parse_module(text)
    entry = module.computations[module.entry]
    return trip_count(module, entry, entry.root)


TESTS = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}


@pytest.mark.parametrize("direction", TESTS)
@pytest.mark.parametrize(("start", "bound", "step"), [(0, 5, 1), (1, 9, 2), (1, 10, 2), (12, 3, -3), (7, 7, 1)])
def test_the_count_is_that_of_running_the_loop(direction, start, bound, step):
    """Otherwise a comparison with 'or equal', a step or a countdown would be off by an iteration."""
    i, ran = start, 0
    while TESTS[direction](i, bound) and ran < 100:
        i, ran = i + step, ran + 1
    assert trips(start, bound, step, direction) == (ran if ran < 100 else None)


def test_a_bound_that_the_loop_carries_and_a_mirrored_test_are_read_too():
    """Otherwise a limit that XLA hoists into the loop's tuple would make the count unknown."""
    assert trips(0, 6, 2, "LT", compared="%i, %n") == 3
    assert trips(0, 6, 2, "GT", compared="%n, %i") == 3


def test_a_test_of_the_next_value_is_read_as_such():
    """Otherwise a loop that looks one step ahead would count one iteration too many."""
    assert trips(-4, 4, 1, "LT", compared="%ahead, %n") == 4


def test_a_start_that_is_an_argument_is_unknown():
    """Otherwise a guess would pass for a count."""
    assert trips(0, 6, 1, "LT", init="%given") is None
