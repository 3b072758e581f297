"""The five mesh axes, their sizes, and the device mesh made from them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.errors import BackendError, PlanError

AXES = ("data", "pipe", "tensor", "seq", "expert")

# A sixth axis, there only when ZeRO shards within a node: `data` is then cut into `replica` (nodes) x `data`.
REPLICA = "replica"

# jaxpar writes the communication of these axes itself; XLA derives that of `tensor` from annotations.
MANUAL_AXES = (REPLICA, "data", "pipe", "seq", "expert")

# A dense parameter is replicated over these, and its gradient summed over them.
REPLICA_AXES = (REPLICA, "data", "seq", "expert")

# ZeRO shards a dense parameter over these.
ZERO_AXES = ("data", "seq", "expert")

ROW_AXES = (REPLICA, "data", "expert")

# From the worst-connected devices to the best-connected ones.
_PHYSICAL_ORDER = ("pipe", REPLICA, "data", "expert", "seq", "tensor")


@dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has; at most one is -1, "what is left"."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    seq: int = 1
    expert: int = 1

    @classmethod
    def parse(cls, text: "str | MeshShape") -> "MeshShape":
        """`"data=-1,pipe=2"` -> `MeshShape`. Axes not named have size 1. Raises `PlanError`."""
        return text if isinstance(text, MeshShape) else _parsed(text)

    def _check(self, text: str) -> None:
        wrong = [f"{n}={s}" for n, s in self.sizes.items() if s < 1 and s != -1]
        if wrong:
            raise PlanError(f"mesh {text!r}: sizes are positive, or -1 for what is left; found {', '.join(wrong)}")
        if list(self.sizes.values()).count(-1) > 1:
            raise PlanError(f"mesh {text!r}: only one axis can be -1, what is left")

    @property
    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "pipe": self.pipe, "tensor": self.tensor, "seq": self.seq, "expert": self.expert}

    def resolve(self, devices: int) -> "MeshShape":
        """Replaces -1 by what is left of `devices`. Raises `PlanError` if the sizes do not multiply to it."""
        sizes = self.sizes
        known = prod(s for s in sizes.values() if s != -1)
        free = next((n for n, s in sizes.items() if s == -1), None)
        if free is not None and devices % known == 0:
            return MeshShape(**{**sizes, free: devices // known})
        if free is None and known == devices:
            return self
        legal = [d for d in range(1, devices + 1) if devices % d == 0]
        mend = (
            f"choose sizes whose product divides {devices} (one of {legal})"
            if free
            else f"choose sizes that multiply to {devices}, or leave one axis at -1"
        )
        raise PlanError(
            f"mesh '{self}' needs {'a multiple of ' if free else ''}{known} devices, found {devices}; {mend}"
        )

    def fixed_size(self) -> int | None:
        """The number of devices, or None while an axis is -1."""
        sizes = self.sizes.values()
        return None if -1 in sizes else prod(sizes)

    def __str__(self) -> str:
        named = [f"{n}={s}" for n, s in self.sizes.items() if s != 1]
        return ",".join(named) or "data=1"


@cache
def _parsed(text: str) -> MeshShape:
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, size = part.partition("=")
        name = name.strip()
        if name not in AXES:
            raise PlanError(f"mesh {text!r}: there is no axis {name!r}; the axes are {', '.join(AXES)}")
        if name in sizes:
            raise PlanError(f"mesh {text!r}: axis {name!r} is given twice")
        try:
            sizes[name] = int(size)
        except ValueError:
            raise PlanError(
                f"mesh {text!r}: axis {name!r} needs a whole number, found {size!r}; write e.g. 'data=4,tensor=2'"
            ) from None
    shape = MeshShape(**sizes)
    shape._check(text)
    return shape


def make_mesh(shape: MeshShape | str, devices: Sequence[jax.Device] | None = None, replicas: int = 1) -> Mesh:
    """A mesh over all five axes in the order of `AXES`, all `AxisType.Auto`.

    `tensor` gets neighbouring devices (the best connected), then `seq`, `expert`, `data`; `pipe` gets the most
    distant ones. With `replicas` > 1 the axis `data` is cut: `replica` comes in front, and `data` is what is left.
    Raises `PlanError` when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = MeshShape.parse(shape).resolve(len(devices)).sizes
    sizes |= {REPLICA: replicas, "data": sizes["data"] // replicas}
    physical = np.asarray(devices, dtype=object).reshape([sizes[a] for a in _PHYSICAL_ORDER])
    names = AXES if replicas == 1 else (REPLICA, *AXES)
    array = physical.transpose([_PHYSICAL_ORDER.index(a) for a in (REPLICA, *AXES)])
    array = array.reshape([sizes[a] for a in names])
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def count(mesh: Mesh, axes: str | Sequence[str]) -> int:
    """How many devices these axes have together; a `PartitionSpec` writes a single one as its bare name."""
    names = (axes,) if isinstance(axes, str) else axes
    return prod(mesh.shape.get(a, 1) for a in names)


def row_shares(mesh: Mesh) -> dict[int, tuple[int, int]]:
    """process -> (i, n): its devices hold part i of n equal parts of a batch's rows.

    Processes that differ in other axes alone hold the same part. Raises `PlanError` for a mesh on which a process holds
    anything else.
    """
    names = [*(a for a in ROW_AXES if a in mesh.axis_names), *(a for a in mesh.axis_names if a not in ROW_AXES)]
    shards = count(mesh, ROW_AXES)
    devices = mesh.devices.transpose([mesh.axis_names.index(a) for a in names]).reshape(shards, -1)
    held: dict[int, list[int]] = {}
    for shard, holders in enumerate(devices):
        for process in sorted({device.process_index for device in holders}):
            held.setdefault(process, []).append(shard)
    each = len(next(iter(held.values())))
    for process, mine in sorted(held.items()):
        if mine[0] % each or mine != list(range(mine[0], mine[0] + each)):
            raise PlanError(
                f"{shards} row shards on {len(held)} processes: each must hold one of equal parts, one shard after "
                f"another, but process {process} holds shards {mine}; make data x expert, or the product of the other "
                f"axes, a multiple of the devices of a process"
            )
    return {process: (mine[0] // each, shards // each) for process, mine in held.items()}


def simulate(devices: int) -> None:
    """Makes this process see `devices` simulated CPU devices. Call it before anything else touches jax.

    Raises `BackendError` when jax has already started with another number of devices.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        if _simulates(devices):
            return
        raise BackendError(
            f"simulate({devices}): jax has already started its devices ({error}); call it before any other use of jax"
        ) from error
    found = jax.local_device_count()
    if found != devices:
        raise BackendError(f"simulate({devices}): jax shows {found} devices; unset XLA_FLAGS' device count, if any")


def _simulates(devices: int) -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() == devices
