"""The report of a compiled step: sizes that can be worked out by hand, and the mesh it belongs to."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.errors import BackendError
from jaxpar.estimate.compile import report
from tests.estimate.programs import NESTED_TOTALS, array, lower, mesh_of, nested


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices(), data=4, tensor=2)


def double(mesh, **jit):
    return lower(lambda x: x * 2 + lax.psum(x, "tensor"), mesh, [array(64, 32)], (P("data"),), P("data"), **jit)


def test_sizes_are_per_device_and_donated_arguments_count_once(mesh):
    """Otherwise a state that is donated would seem to need twice its memory, or a shard the whole array's."""
    kept, donated = report(double(mesh), mesh), report(double(mesh, donate_argnums=0), mesh)
    shard = 64 * 32 * 4 // 4
    assert (kept.argument_bytes, kept.output_bytes) == (shard, shard)
    assert kept.peak_bytes == 2 * shard + kept.temp_bytes
    assert donated.peak_bytes == shard + donated.temp_bytes


def test_a_report_has_the_programs_collectives_and_flops(mesh):
    """Otherwise the report would be of something else than the program."""
    found = report(nested(mesh), mesh)
    assert found.totals() == NESTED_TOTALS
    assert found.flops > 0 and found.compile_seconds > 0
    assert (found.devices, found.device_kind) == (8, "cpu")


def test_a_compiled_program_is_read_as_it_is(mesh):
    """Otherwise a program in use would be compiled a second time."""
    found = report(double(mesh).compile(), mesh)
    assert found.compile_seconds == 0
    assert found.totals() == {(("tensor",), "all-reduce"): (1, 64 * 32)}


def test_another_order_of_the_devices_is_refused(mesh):
    """Otherwise the axes would be read off the wrong positions."""
    with pytest.raises(BackendError, match="another order"):
        report(double(mesh), mesh_of(jax.devices()[::-1], data=4, tensor=2))


def test_the_table_shows_sizes_collectives_and_what_is_only_a_bound(mesh):
    """Otherwise a person would have to read the fields, or would take a lower bound for a count."""

    def program(x, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, lax.psum(c[1], "data")), (0, x))[1]

    table = report(lower(program, mesh, [array(256), array(dtype=jnp.int32)], (P(), P()), P()), mesh).table()
    assert "8 x cpu" in table
    assert [line.split() for line in table.splitlines() if "all-reduce" in line] == [
        ["data", "all-reduce", "1", "1.00", "KiB", "0%"]
    ]
    assert "at least: loop while" in table
