"""What XLA is told of GPUs that are not there."""

import pytest

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import device
from jaxpar.estimate.target import target_config


@pytest.mark.parametrize("kind", ["h100", "h200", "a100", "b200"])
def test_a_targets_memory_is_the_devices(kind):
    """Otherwise XLA would plan for another memory than the one the report is compared with."""
    assert f"device_memory_size: {device(kind).memory_bytes}\n" in target_config(kind)


@pytest.mark.parametrize("kind", ["cpu", "v5e", "mi300x"])
def test_only_cuda_devices_have_a_target(kind):
    """Otherwise the GPU compiler would be asked for something else."""
    with pytest.raises(ConfigError, match="CUDA devices"):
        target_config(kind)
