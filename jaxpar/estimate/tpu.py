"""Slices of TPUs that need not be there: `4x4xv5e` is 4 hosts of 4 chips, the slice `v5e:4x4`."""

import importlib.util
import os
from math import prod

import jax
from jax.experimental import topologies

from jaxpar.errors import BackendError, ConfigError
from jaxpar.estimate.hardware import Cluster

# Chips of one host along each dim of a slice.
HOSTS = {"v5e": (2, 2), "v6e": (2, 2), "v5p": (2, 2, 1)}


def tpu_devices(cluster: Cluster) -> list[jax.Device]:
    """A slice of that many chips, as nearly a square or a cube as whole hosts make it, host by host.

    Raises BackendError when libtpu is missing, ConfigError for nodes that are no hosts.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise BackendError(
            f"compiling for {cluster} needs XLA's TPU compiler, and libtpu is not installed (no TPU is needed): "
            "pip install 'jaxpar[aot-tpu]'"
        )
    name = f"{cluster.chip}:{'x'.join(map(str, slice_shape(cluster)))}"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU whose metadata could be asked
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except RuntimeError as error:  # jax's own errors are of this kind
        raise BackendError(
            f"the installed libtpu and jax {jax.__version__} cannot describe {name}: {error}. Are they of the same "
            "time? pip install 'jaxpar[aot-tpu]'"
        ) from error


def slice_shape(cluster: Cluster) -> tuple[int, ...]:
    """Chips along each dim. Raises ConfigError for nodes that are no hosts."""
    host = HOSTS[cluster.chip]
    if cluster.devices_per_node != prod(host):
        raise ConfigError(
            f"{cluster}: a host of {cluster.kind} has {prod(host)} chips; write NODESx{prod(host)}x{cluster.kind}"
        )
    hosts = _even_factors(cluster.nodes, len(host))
    return tuple(sorted(chips * n for chips, n in zip(host, hosts, strict=True)))


def _even_factors(number: int, dims: int) -> tuple[int, ...]:
    """`number` as a product of so many factors that are as alike as can be, the largest last."""
    if dims == 1:
        return (number,)
    root = next(d for d in range(round(number ** (1 / dims) + 0.5), 0, -1) if number % d == 0)
    return (root, *_even_factors(number // root, dims - 1))
