"""Collectives that XLA splits into a start and a done count once, and overlap only what stands between."""

import pytest

from jaxpar.estimate.hlo import read_hlo

TEXT = """HloModule m, is_scheduled=true, num_partitions=2

%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}}

%wrapped (w: f32[8,8]) -> f32[4,8] {{
  %w = f32[8,8]{{1,0}} parameter(0)
  ROOT %scattered = f32[4,8]{{1,0}} reduce-scatter(%w), channel_id=2, {both}, to_apply=%add
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %dot.0 = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {start}
  {between}
  {done}
  ROOT %dot.2 = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
BOTH = "replica_groups={{0,1}}, dimensions={0}"
DOT = "%dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
COPY = "%copy.1 = f32[8,8]{1,0} copy(%x)"
FORMS = {
    "all-gather": (
        "%s = (f32[8,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), channel_id=1, " + BOTH,
        "%d = f32[16,8]{1,0} all-gather-done(%s)",
        2 * 256,
    ),
    "all-reduce": (
        "%s = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-reduce-start(%x), channel_id=1, replica_groups={}, to_apply=%add",
        "%d = f32[8,8]{1,0} all-reduce-done(%s)",
        256,
    ),
    "collective-permute": (
        "%s = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, "
        "source_target_pairs={{0,1},{1,0}}",
        "%d = f32[8,8]{1,0} collective-permute-done(%s)",
        256,
    ),
    "reduce-scatter": (
        "%s = ((f32[8,8]{1,0}), f32[4,8]{1,0}, s32[]) async-start(%x), calls=%wrapped\n"
        "  %u = ((f32[8,8]{1,0}), f32[4,8]{1,0}, s32[]) async-update(%s), calls=%wrapped",
        "%d = f32[4,8]{1,0} async-done(%u), calls=%wrapped",
        256,
    ),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("between", "overlaps"), [(DOT, True), (COPY, False)])
def test_start_and_done_are_one_collective_that_overlaps_a_dot_between_them(kind, between, overlaps):
    """Otherwise it would count twice, or pass for hidden when nothing hides it."""
    start, done, size = FORMS[kind]
    found = read_hlo(TEXT.format(both=BOTH, start=start, between=between, done=done), {"data": 2})
    assert found.totals() == {(("data",), kind): (1, size)}
    (only,) = found.collectives
    assert (only.asynchronous, only.overlaps_dot) == (True, overlaps)


def test_operands_of_a_combined_collective_add_up():
    """Otherwise the leaves that XLA merges into one collective would count as its first."""
    start = "%all = (f32[16,8]{1,0}, f32[16,8]{1,0}) all-gather(%x, %dot.0), channel_id=1, " + BOTH
    found = read_hlo(TEXT.format(both=BOTH, start=start, between=COPY, done=""), {"data": 2})
    assert found.totals() == {(("data",), "all-gather"): (1, 2 * 512)}
    assert not found.collectives[0].asynchronous
