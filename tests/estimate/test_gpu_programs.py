"""H100 programs, compiled for real on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from jaxpar.estimate.compile import report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.hlo import read_hlo
from jaxpar.estimate.target import target_config
from jaxpar.estimate.topology import compiler_options, topology_devices
from tests.estimate.programs import DOT_FLOPS, NESTED_TOTALS, array, lower, mesh_of, nested


@pytest.fixture(scope="session")
def h100s():
    """Eight H100s of one node, described only."""
    return topology_devices(Cluster.parse("1x8xh100"))


@pytest.fixture(scope="session")
def nested_report(h100s):
    mesh = mesh_of(h100s, data=4, tensor=2)
    return report(nested(mesh), mesh)


def test_the_h100_program_communicates_as_the_cpu_program_does(nested_report):
    """Otherwise what tests see on CPU would say nothing about the program that trains."""
    assert nested_report.totals() == NESTED_TOTALS
    assert nested_report.flops == 15 * DOT_FLOPS


def test_the_report_is_of_an_h100(nested_report):
    """Otherwise it would be the host's program, which looks much the same."""
    assert nested_report.device_kind == "NVIDIA H100 80GB HBM3"
    assert jax.default_backend() == "cpu"


def test_nodes_are_processes_in_order():
    """Otherwise an axis meant for one node would cross the network."""
    devices = topology_devices(Cluster.parse("3x4xh100"))
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert [d.id for d in devices] == list(range(12))


@pytest.mark.parametrize("kind", ["a100", "h200"])
def test_other_kinds_compile_too(kind):
    """Otherwise a kind would be known by name and fail when it is used."""
    mesh = mesh_of(topology_devices(Cluster.parse(f"1x2x{kind}")), data=2)
    found = report(lower(lambda x: lax.psum(x @ x, "data"), mesh, [array(64, 64)], (P(),), P()), mesh)
    assert found.totals() == {(("data",), "all-reduce"): (1, 64 * 64 * 4)}
    assert found.flops == 2 * 64**3


def test_a_scalar_sum_over_many_nodes_compiles():
    """Otherwise a loss summed over 64 devices would end the process inside XLA."""
    mesh = mesh_of(topology_devices(Cluster.parse("8x8xh100")), data=8, tensor=8)
    lowered = lower(lambda x: x * lax.psum(x.sum(), ("data", "tensor")), mesh, [array(64, 8)], (P("data"),), P("data"))
    assert report(lowered, mesh).totals() == {(("data", "tensor"), "all-reduce"): (1, 4)}


def test_an_all_reduce_inside_a_kernel_is_found():
    """Otherwise the small all-reduces that XLA fuses where it knows of NVLink would be missing."""
    linked = target_config("h100").replace(
        "gpu_device_info {", "gpu_device_info { device_interconnect_info { active_links: 18 }"
    )
    devices = topologies.get_topology_desc(platform="cuda", target_config=linked, topology="1x1x8").devices
    mesh = mesh_of(devices, data=4, tensor=2)
    lowered = lower(lambda x: x * lax.psum(x * 2, "tensor"), mesh, [array(64, 32)], (P("data"),), P("data"))
    text = lowered.compile(compiler_options=compiler_options("gpu")).as_text()
    assert "__triton_collective" in text
    assert read_hlo(text, mesh.shape).totals() == {(("tensor",), "all-reduce"): (1, 16 * 32 * 4)}


def test_a_loop_that_xla_double_buffers_counts_its_peeled_iteration(h100s):
    """Otherwise the iteration that XLA takes out of a loop, or the one it adds to the body, would be lost."""
    mesh = mesh_of(h100s, data=8)

    def program(shards, x):
        layer = lambda x, w: (jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None)  # noqa: E731
        return lax.scan(layer, x, shards)[0]

    arguments, specs = [array(7, 64, 64), array(64, 64)], (P(None, "data"), P())
    options = compiler_options("gpu") | {"xla_gpu_enable_while_loop_double_buffering": True}
    text = lower(program, mesh, arguments, specs, P()).compile(compiler_options=options).as_text()
    assert len(re.findall(r" all-gather(-start)?\(", text)) == 3  # one before the loop, two in its body
    found = read_hlo(text, mesh.shape)
    assert found.totals() == {(("data",), "all-gather"): (7, 7 * 64 * 64 * 4)}
    assert found.dot_flops == 7 * 2 * 64**3
