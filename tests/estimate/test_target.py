"""What XLA is told of GPUs that are not there."""

from dataclasses import replace

import pytest

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import device
from jaxpar.estimate.target import target_config


@pytest.mark.parametrize("kind", ["h100", "h200", "a100", "b200"])
def test_a_targets_memory_is_the_devices(kind):
    """Otherwise XLA would plan for another memory than the one the report is compared with."""
    assert f"device_memory_size: {device(kind).memory_bytes}\n" in target_config(kind)


def test_a_variant_of_a_kind_has_its_own_memory_and_cores():
    """Otherwise a device from a file could be planned for, and not compiled for."""
    mine = replace(device("h100"), memory_bytes=96 * 2**30, cores=114)
    text = target_config("h100", mine)
    assert f"device_memory_size: {96 * 2**30}\n" in text and "core_count: 114\n" in text
    assert "cuda_compute_capability { major: 9 " in text


@pytest.mark.parametrize("kind", ["cpu", "v5e", "mi300x"])
def test_only_cuda_devices_have_a_target(kind):
    """Otherwise the GPU compiler would be asked for something else."""
    with pytest.raises(ConfigError, match="CUDA devices"):
        target_config(kind)
