"""Clusters by name, and what their devices can do."""

import pytest

from jaxpar.errors import ConfigError
from jaxpar.estimate.hardware import Cluster, device, device_named, target_config


def test_a_cluster_is_nodes_by_devices_by_kind():
    """Otherwise a plan would be made for another number of devices."""
    cluster = Cluster.parse("4x8xh100")
    assert cluster == Cluster(nodes=4, devices_per_node=8, kind="h100")
    assert (cluster.size, str(cluster)) == (32, "4x8xh100")
    assert cluster.device is device("h100")


@pytest.mark.parametrize(
    "text", ["h100", "8xh100", "0x8xh100", "4x-1xh100", "4x8x", "4x8xh1000", "2x8xh100+2x8xa100", ""]
)
def test_any_other_cluster_raises_and_names_the_kinds(text):
    """Otherwise a typo would compile for something."""
    with pytest.raises(ConfigError, match=r"h100.*h200.*a100.*cpu"):
        Cluster.parse(text)


@pytest.mark.parametrize("kind", ["h100", "h200", "a100"])
def test_a_targets_memory_is_the_devices(kind):
    """Otherwise XLA would plan for another memory than the one the report is compared with."""
    assert f"device_memory_size: {device(kind).memory_bytes}\n" in target_config(kind)


def test_cpu_has_no_gpu_target():
    """Otherwise the GPU compiler would be asked for a CPU."""
    with pytest.raises(ConfigError, match="no CUDA device"):
        target_config("cpu")


def test_a_device_is_found_by_the_name_that_jax_has_for_it():
    """Otherwise the speed of a run would be set against another device's peak, or an imagined one's."""
    assert device_named("NVIDIA H200") is device("h200")
    assert device_named("cpu") is None and device_named("NVIDIA GeForce RTX 4090") is None
