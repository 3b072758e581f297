"""Devices of a cluster that need not be there, to lower and compile for."""

import importlib.util

import jax
from jax.experimental import topologies

from jaxpar.errors import BackendError
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.target import target_config
from jaxpar.estimate.tpu import HOSTS, tpu_devices
from jaxpar.executor.options import Options, step_options


def topology_devices(cluster: Cluster) -> list[jax.Device]:
    """The cluster's devices, node by node: simulated ones of this process for `cpu`, else ones to compile for
    only.

    Raises BackendError when the CUDA plugin or libtpu is missing, or when fewer than `cluster.size` CPU devices are
    simulated.
    A mixed cluster raises ConfigError: a program is for one kind.
    """
    cluster.check_one_kind()
    if cluster.chip == "cpu":
        return _simulated(cluster)
    if cluster.chip in HOSTS:
        return tpu_devices(cluster)
    if not _cuda_plugin_installed():
        raise BackendError(
            f"compiling for {cluster} needs XLA's CUDA compiler, and jax-cuda12-plugin is not installed "
            "(no GPU and no CUDA library is needed): pip install 'jaxpar[aot-gpu]'"
        )
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=target_config(cluster.chip, cluster.custom),
            topology=f"1x{cluster.nodes}x{cluster.devices_per_node}",
        )
    except RuntimeError as error:  # jax's own errors are of this kind
        raise BackendError(
            f"the installed jax {jax.__version__} cannot describe {cluster}: {error}. Are jax-cuda12-plugin "
            "and jax-cuda12-pjrt of the same version as jax? pip install 'jaxpar[aot-gpu]'"
        ) from error
    return list(described.devices)


def compiler_options(platform: str) -> Options:
    """What `lowered.compile(compiler_options=...)` needs on this platform (`device.platform`): a run's own options, and
    no autotuning, which would have to run kernels on a device that is not there."""
    return {"xla_gpu_autotune_level": 0, **step_options(platform)} if platform in ("cuda", "gpu") else {}


def _cuda_plugin_installed() -> bool:
    # jax_plugins is a namespace package: without any plugin its parent is missing too.
    return bool(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda12"))


def _simulated(cluster: Cluster) -> list[jax.Device]:
    devices = jax.devices("cpu")
    if len(devices) < cluster.size:
        raise BackendError(
            f"cluster {cluster} needs {cluster.size} simulated CPU devices, this process has {len(devices)}: "
            f"call jax.config.update('jax_num_cpu_devices', {cluster.size}) before jax is first used"
        )
    return devices[: cluster.size]
