"""Devices to compile for: simulated, described, or an error that says what is missing."""

import jax
import pytest

from jaxpar.errors import BackendError
from jaxpar.estimate import topology
from jaxpar.estimate.hardware import Cluster


def test_a_simulated_cluster_gives_this_processs_devices():
    """Otherwise a simulated report could not be compared with a run."""
    assert topology.topology_devices(Cluster.parse("2x2xcpu")) == jax.devices()[:4]


def test_too_few_simulated_devices_raise_with_the_mend():
    """Otherwise the mesh would fail later, far from its cause."""
    with pytest.raises(BackendError, match=r"needs 16 simulated CPU devices, this process has 8.*jax_num_cpu_devices"):
        topology.topology_devices(Cluster.parse("2x8xcpu"))


def test_a_missing_plugin_raises_with_the_extras_name(monkeypatch):
    """Otherwise the user would read that a topology is not implemented."""
    monkeypatch.setattr(topology, "_cuda_plugin_installed", lambda: False)
    with pytest.raises(BackendError, match=r"pip install 'jaxpar\[aot-gpu\]'"):
        topology.topology_devices(Cluster.parse("1x8xh100"))


def test_gpu_options_are_for_gpus_only():
    """Otherwise the CPU compiler would refuse them, or the GPU's autotuner look for a GPU."""
    assert topology.compiler_options("cpu") == {}
    assert topology.compiler_options("gpu")["xla_gpu_autotune_level"] == 0
