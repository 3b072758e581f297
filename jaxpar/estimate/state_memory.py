"""What a step is given and gives back, to the byte: parameters, optimizer state and batch on one device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar import offload
from jaxpar.batch import BatchAxes, batch_spec
from jaxpar.optimizer_state import leaf_placements
from jaxpar.placement import Placement

Sizes = Mapping[str, int]

# Beside parameters and optimizer, a state has two counters and a random key, int32 all.
COUNTERS = 4 * (1 + 1 + 2)


@dataclass(frozen=True)
class StateBytes:
    """On one device. `parameters`, `optimizer`, `on_host` of the latter, `batch`."""

    parameters: int
    optimizer: int
    on_host: int
    batch: int

    @property
    def arguments(self) -> int:
        """What the device is given."""
        return self.parameters + self.optimizer - self.on_host + self.batch + COUNTERS


def state_bytes(
    placements: Mapping[str, Placement], optimizer: Any, sizes: Sizes, offloads: bool, batch: int
) -> StateBytes:
    """`optimizer`: its abstract state for parameters as they are viewed; `sizes`: of the mesh axes."""
    parameters = sum(stored(p, p.param_spec(), p.info.dtype, sizes) for p in placements.values())
    held = away = 0
    leaves = jax.tree.leaves(optimizer)
    for leaf, p in zip(leaves, leaf_placements(optimizer, placements), strict=True):
        size = leaf.size * leaf.dtype.itemsize if p is None else stored(p, p.update_spec(), leaf.dtype, sizes)
        held += size
        away += size if offloads and offload.worth_moving(leaf) else 0
    return StateBytes(parameters, held, away, batch)


def batch_bytes(shapes: Mapping[str, Any], axes: BatchAxes, sizes: Sizes) -> int:
    return sum(local_bytes(x.shape, batch_spec(axes, name), x.dtype, sizes) for name, x in shapes.items())


def stored(p: Placement, spec: P, dtype: Any, sizes: Sizes) -> int:
    return local_bytes(p.storage_shape, spec, dtype, sizes)


def local_bytes(shape: Sequence[int], spec: P, dtype: Any, sizes: Sizes) -> int:
    """Of one device's part of an array."""
    parts = prod(sizes.get(axis, 1) for dim in spec for axis in _axes(dim))
    return prod(shape) * np.dtype(dtype).itemsize // parts


def _axes(dim: Any) -> Iterable[str]:
    return () if dim is None else (dim,) if isinstance(dim, str) else dim
