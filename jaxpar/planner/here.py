"""The devices at hand as a cluster, and the best plan on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import optax

from jaxpar.batch import TOKENS, BatchAxes
from jaxpar.errors import BackendError
from jaxpar.estimate.devices import device_named
from jaxpar.estimate.hardware import Cluster
from jaxpar.plan import Plan
from jaxpar.planner.search import search
from jaxpar.planner.sharpen import sharpen
from jaxpar.planner.space import Space
from jaxpar.structure import Build


def cluster_here(devices: Sequence[jax.Device] | None = None) -> Cluster:
    """These devices (default: all). A node is what shares a process. Raises `BackendError` for a kind not known."""
    devices = jax.devices() if devices is None else list(devices)
    each = min(Counter(d.process_index for d in devices).values())
    first = devices[0]
    if first.platform == "cpu":
        return Cluster(len(devices) // each, each, "cpu")
    if (found := device_named(first.device_kind)) is None:
        raise BackendError(
            f"there are no figures for {first.device_kind!r}: describe it in a file (see docs/estimate.md) and give "
            f"the planner Cluster.from_file"
        )
    return replace(Cluster(len(devices) // each, each, first.device_kind), custom=found)


def auto(
    build: Build,
    optimizer: optax.GradientTransformation,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    cluster: str | Cluster | None = None,
    base: Plan | None = None,
    space: Space | None = None,
    batch_axes: BatchAxes = TOKENS,
    budget: int | None = None,
) -> Plan:
    """The best plan of `search` that also fits as traced, on `cluster` or the devices at hand. Raises `PlanError` with
    the reason for none."""
    cluster = cluster_here() if cluster is None else cluster
    found = search(build, optimizer, cluster, shapes, base=base, space=space, batch_axes=batch_axes, budget=budget)
    return sharpen(found, 1).best.plan
