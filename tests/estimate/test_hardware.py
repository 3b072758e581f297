"""Clusters by name and from files, and what their devices can do."""

import json

import pytest

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import Device, device, device_named, kinds
from jaxpar.estimate.hardware import Cluster

# Peaks of dense bfloat16 products by the data sheets, TFLOP/s, and gigabytes of memory.
SHEETS = {
    "a100-40": (312, 40), "a100": (312, 80), "h100": (989, 80), "h100-pcie": (756, 80), "h200": (989, 141),
    "b200": (2250, 180), "gb200": (2500, 186), "gb300": (2500, 279), "mi300x": (1307, 192), "v5e": (197, 16),
    "v5p": (459, 95), "v6e": (918, 32),
}  # fmt: skip

FILE = """
[[nodes]]
count = 2
devices = 8
kind = "mine"

[[nodes]]
count = 1
devices = 4
kind = "a100"

[kinds.mine]
like = "h100"
memory_bandwidth = 2.4e12
price = 2.5
slow = { bandwidth = 25e9 }

[kinds.a100]
price = 1.0
"""


def test_a_cluster_is_nodes_by_devices_by_kind():
    """Otherwise a plan would be made for another number of devices."""
    cluster = Cluster.parse("4x8xh100")
    assert cluster == Cluster(nodes=4, devices_per_node=8, kind="h100")
    assert (cluster.size, str(cluster)) == (32, "4x8xh100")
    assert cluster.device is device("h100")


@pytest.mark.parametrize(
    "text", ["h100", "8xh100", "0x8xh100", "4x-1xh100", "4x8x", "4x8xh1000", "2x8xh100+8xa100", ""]
)
def test_any_other_cluster_raises_and_names_the_kinds(text):
    """Otherwise a typo would compile for something."""
    with pytest.raises(ConfigError, match=r"h100.*h200.*cpu"):
        Cluster.parse(text)


def test_a_mixed_cluster_goes_at_the_pace_of_its_slowest_part():
    """Otherwise a step would be promised that half of the devices cannot keep."""
    cluster = Cluster.parse("2x8xh100+2x4xa100")
    assert (cluster.size, str(cluster), len(cluster.parts)) == (24, "2x8xh100+2x4xa100", 2)
    pace = cluster.pace
    assert (pace.bf16_flops, pace.fp8_flops, pace.node) == (312e12, 0.0, 4)
    assert (pace.memory_bytes, pace.fast) == (device("h100").memory_bytes, device("a100").fast)
    assert pace.matmul_fraction == device("a100").matmul_fraction
    with pytest.raises(ConfigError, match="compile once for each, 2x8xh100 and 2x4xa100"):
        _ = cluster.device


@pytest.mark.parametrize("kind", SHEETS)
def test_rates_and_sizes_are_the_data_sheets(kind):
    """Otherwise a slip in a power of ten would make a plan for another device."""
    flops, gigabytes = SHEETS[kind]
    found = device(kind)
    assert found.bf16_flops == pytest.approx(flops * 1e12, rel=1e-3)
    assert found.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.08)
    assert found.f32_flops < found.bf16_flops and 0.4 < found.matmul_fraction < 1
    assert found.slow.bandwidth < found.fast.bandwidth < found.memory_bandwidth


def test_a_file_defines_kinds_of_ones_own(tmp_path):
    """Otherwise a cluster that is not in the table could not be planned for."""
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    cluster = Cluster.from_file(path)
    mine = cluster.parts[0].device
    assert str(cluster) == "2x8xmine+1x4xa100" and cluster.price == 2 * 8 * 2.5 + 4 * 1.0
    assert (mine.memory_bandwidth, mine.slow.bandwidth) == (2.4e12, 25e9)
    assert (mine.bf16_flops, mine.slow.latency) == (device("h100").bf16_flops, device("h100").slow.latency)
    assert [part.chip for part in cluster.parts] == ["h100", "a100"] and Cluster.read(str(path)) == cluster


def test_a_json_file_says_the_same(tmp_path):
    """Otherwise only one of the two formats would be read as the docs say."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": [{"count": 4, "devices": 8, "kind": "h200"}]}))
    assert Cluster.from_file(path) == Cluster.parse("4x8xh200")
    assert Cluster.from_file(path).price is None


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("", r"write \[\[nodes\]\] with count"),
        ("[[nodes]]\ncount = 0\ndevices = 8\nkind = 'h100'", "whole and positive"),
        ("[[nodes]]\ncount = 1\ndevices = 8\nkind = 'h101'", "known kinds are"),
        ("[kinds.mine]\nlike = 'h100'\nspeed = 3\n", "cannot read speed; known: bf16_flops"),
        ("[kinds.h100]\nslow = 3\n", "slow have bandwidth and latency"),
        ("nodes", "needs TOML"),
    ],
)
def test_a_wrong_file_raises_and_says_the_mend(tmp_path, text, mend):
    """Otherwise a slip in the file would be planned for in silence."""
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=mend):
        Cluster.from_file(path)


def test_racks_are_one_domain_and_machines_are_theirs():
    """Otherwise tensor parallelism over a rack's NVLink would be timed as if it crossed a network."""
    assert Cluster.parse("18x4xgb200").pace.node == 72
    assert Cluster.parse("8x4xh100").pace.node == 4


def test_a_device_is_found_by_the_name_that_jax_has_for_it():
    """Otherwise the speed of a run would be set against another device's peak, or an imagined one's."""
    assert device_named("NVIDIA H200") is device("h200")
    assert device_named("cpu") is None and device_named("NVIDIA GeForce RTX 4090") is None


def test_the_table_covers_what_the_docs_promise():
    """Otherwise a kind would be missing without anybody's notice."""
    assert set(kinds().split(", ")) == {*SHEETS, "cpu"}
    assert all(isinstance(device(kind), Device) for kind in SHEETS)
