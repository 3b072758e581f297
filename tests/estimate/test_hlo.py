"""Reading compiled programs: executions, bytes and axes are those that were written down by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.errors import BackendError
from jaxpar.estimate.hlo import read_hlo
from tests.estimate.programs import (
    DOT_FLOPS,
    INNER,
    NESTED_TOTALS,
    OUTER,
    array,
    lower,
    mesh_of,
    nested,
    placed,
)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices(), data=4, tensor=2)


@pytest.fixture(scope="module")
def nested_text(mesh):
    return nested(mesh).compile().as_text()


def read(lowered, mesh):
    return read_hlo(lowered.compile().as_text(), mesh.shape)


def test_every_kind_is_counted_as_often_as_nested_loops_run_it(nested_text, mesh):
    """Otherwise a layer's collective would count once however many layers and microbatches there are."""
    assert read_hlo(nested_text, mesh.shape).totals() == NESTED_TOTALS


def test_a_dot_in_a_scan_in_a_scan_counts_fifteen_times(nested_text, mesh):
    """Otherwise the FLOPs of a program would be those of its text."""
    assert read_hlo(nested_text, mesh.shape).dot_flops == 15 * DOT_FLOPS == OUTER * INNER * DOT_FLOPS


def test_loop_depth_and_name_say_where_a_collective_stands(nested_text, mesh):
    """Otherwise a gather per layer could not be told from one outside the loop."""
    depths = {
        c.kind: (c.loop_depth, c.op_name.rpartition("/")[2]) for c in read_hlo(nested_text, mesh.shape).collectives
    }
    assert depths["all-gather"] == (2, "all_gather")
    assert depths["collective-permute"] == (1, "ppermute")
    assert depths["all-reduce"] == (0, "psum")  # the last one: the sum of everything


def test_trip_counts_that_xla_does_not_print_are_read_off_the_condition(nested_text, mesh):
    """Otherwise an XLA pass that drops its annotation would shrink every count to one iteration."""
    bare = re.sub(r'"known_\w+":\{[^{}]*\},?', "", nested_text)
    assert "known_trip_count" in nested_text and "known_trip_count" not in bare
    assert read_hlo(bare, mesh.shape) == read_hlo(nested_text, mesh.shape)


@pytest.mark.parametrize("unroll", [2, 4])
def test_peeled_iterations_count_as_executions(mesh, unroll):
    """Otherwise the remainder of an unrolled loop would be lost, or an unrolled body count as one."""

    def program(x):
        return lax.scan(lambda c, _: (jnp.tanh(lax.psum(c @ c, "tensor")), None), x, length=9, unroll=unroll)[0]

    found = read(lower(program, mesh, [array(8, 8)], (P(),), P()), mesh)
    assert found.totals() == {(("tensor",), "all-reduce"): (9, 9 * 8 * 8 * 4)}
    assert found.dot_flops == 9 * 2 * 8**3


@pytest.mark.parametrize("strip", [False, True])
def test_while_loops_with_a_step_count_their_iterations(mesh, strip):
    """Otherwise only loops from 0 by 1 would be read right."""

    def program(x):
        body = lambda c: (c[0] - 3, lax.psum(c[1] @ c[1], "data"))  # noqa: E731
        return lax.while_loop(lambda c: c[0] >= 2, body, (jnp.int32(12), x))[1]  # 12, 9, 6, 3

    text = lower(program, mesh, [array(8, 8)], (P(),), P()).compile().as_text()
    text = re.sub(r'"known_\w+":\{[^{}]*\},?', "", text) if strip else text
    assert read_hlo(text, mesh.shape).totals() == {(("data",), "all-reduce"): (4, 4 * 8 * 8 * 4)}


def test_a_loop_that_only_the_run_can_count_is_named(mesh):
    """Otherwise a count that is too small would look like the truth."""

    def program(x, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, lax.psum(c[1], "data")), (0, x))[1]

    found = read(lower(program, mesh, [array(8), array(dtype=jnp.int32)], (P(), P()), P()), mesh)
    assert len(found.unknown_loops) == 1
    assert found.totals() == {(("data",), "all-reduce"): (1, 32)}


def test_what_a_condition_communicates_is_counted(mesh):
    """Otherwise a loop that runs until all devices agree would seem silent."""

    def program(x):
        return lax.while_loop(lambda x: lax.psum(x, "data")[0] < 100, lambda x: x * 2, x)

    found = read(lower(program, mesh, [array(8)], (P(),), P()), mesh)
    assert found.totals() == {(("data",), "all-reduce"): (1, 32)}
    assert len(found.unknown_loops) == 1


def test_a_conditional_counts_its_dearest_branch_and_says_so(mesh):
    """Otherwise both branches would count, though one runs."""

    def program(x, flag):
        many = lambda x: lax.psum(lax.psum(x @ x, "data") @ x, "data")  # noqa: E731
        return lax.cond(flag, many, lambda x: lax.psum(x * 2, "data"), x)

    found = read(lower(program, mesh, [array(8, 8), array(dtype=bool)], (P(), P()), P()), mesh)
    assert found.totals() == {(("data",), "all-reduce"): (2, 2 * 8 * 8 * 4)}
    assert found.dot_flops == 2 * 2 * 8**3
    assert all(c.conditional for c in found.collectives)


def test_collectives_that_xla_inserts_are_named_by_our_axes(mesh):
    """Otherwise tensor parallelism, which XLA writes with axis names of its own, would be invisible."""

    def program(x, w):
        reduced = lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))
        return lax.with_sharding_constraint(jnp.tanh(reduced), NamedSharding(mesh, P(None, None)))

    specs = P("data", "tensor"), P("tensor", None)
    found = read(jax.jit(program).lower(*placed(mesh, [array(16, 32), array(32, 64)], specs)), mesh)
    assert found.totals() == {
        (("tensor",), "all-reduce"): (1, 4 * 64 * 4),
        (("data",), "all-gather"): (1, 16 * 64 * 4),
    }


def test_axes_follow_the_order_of_the_meshs_devices():
    """Otherwise a mesh laid out for the network would have its axes confused."""
    shuffled = [jax.devices()[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    mesh = mesh_of(shuffled, data=2, seq=2, tensor=2)
    found = read(lower(lambda x: lax.psum(x, ("data", "tensor")), mesh, [array(8)], (P(),), P()), mesh)
    assert found.totals() == {(("data", "tensor"), "all-reduce"): (1, 32)}


def test_parts_of_an_axis_are_told_apart(mesh):
    """Otherwise sharding within a node and across nodes would look the same."""

    def program(x):
        inside = lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])
        return lax.psum(jnp.tanh(inside), "data", axis_index_groups=[[0, 2], [1, 3]])

    found = read(lower(program, mesh, [array(8)], (P(),), P()), mesh)
    assert set(found.totals()) == {(("data:(2)2",), "all-reduce"), (("data:(1)2",), "all-reduce")}


def test_groups_of_one_device_are_left_out_unless_asked_for():
    """Otherwise axes of size 1 would seem to communicate."""
    mesh = mesh_of(jax.devices(), data=4, pipe=1, tensor=2)
    text = """HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[8,1]<=[8], to_apply=%add
}
"""
    found = read_hlo(text, mesh.shape)
    assert found.totals() == {}
    assert found.totals(singletons=True) == {((), "all-reduce"): (1, 32)}


def test_a_mesh_of_another_size_is_refused(nested_text):
    """Otherwise the groups would be read against axes they know nothing of."""
    with pytest.raises(BackendError, match=r"runs on 8 devices.*'data': 2"):
        read_hlo(nested_text, {"data": 2, "tensor": 2})
