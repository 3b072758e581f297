"""A start-up check that the installed jax computes what it is asked to on sharded arrays.

Several jax and XLA releases have returned wrong numbers, without an error, for the operations below. Trying
them takes half a second on eight simulated devices: less than a night spent on a compiler that cannot add.

Each check compares *every device's shard* with the right answer, not the assembled array, which would hide a
replica that went astray. Only the devices of this process take part: no collective crosses to another one, so
a process that finds its answer in the cache leaves nobody waiting.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.errors import BackendError

type Case = tuple[jax.Array, np.ndarray]  # what the devices gave, and the right answer
type Check = Callable[[Sequence[jax.Device]], Iterator[Case]]


def self_check(devices: Sequence[jax.Device] | None = None) -> None:
    """Try on `devices` (default: all) the sharded operations that jaxpar leans on; remember a pass on disk.

    One device has nothing to get wrong and passes. A pass is kept in `~/.cache/jaxpar` (`XDG_CACHE_HOME` is
    honoured) for this jax, jaxlib, platform, device count and `XLA_FLAGS`; a failure never is. Raises
    `BackendError` that names each operation with its wrong number, its right one, and the jax release.
    """
    devices = jax.devices() if devices is None else devices
    local = [device for device in devices if device.process_index == jax.process_index()]
    if len(local) < 2:
        return
    key = _cache_key(local)
    if key in _passed():
        return
    faults = [fault for name, check in CHECKS.items() if (fault := _fault(name, check, local))]
    if faults:
        raise BackendError(
            f"jax cannot be trusted here ({key}): an operation on sharded arrays gave a wrong result:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nInstall another jax release, or take out the XLA_FLAGS that change the compiler."
        )
    _remember(key)


def _fault(name: str, check: Check, devices: Sequence[jax.Device]) -> str | None:
    """What is wrong with one operation, as prose that begins with its name; None when it is right."""
    try:
        for found, right in check(devices):
            if difference := first_difference(found, right):
                return f"{name}: {difference}"
    except Exception as error:  # whatever it is, the user must learn which operation it came from
        return f"{name}: raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def first_difference(found: jax.Array, right: np.ndarray) -> str | None:
    """The first element of any device's shard that is not `right`, as prose; None when there is none."""
    if found.shape != right.shape:
        return f"has shape {found.shape}, must be {right.shape}"
    for shard in found.addressable_shards:
        here, must = np.asarray(shard.data), right[shard.index]
        wrong = np.argwhere(here != must)
        if len(wrong):
            at = tuple(wrong[0])
            where = [int(i + (s.start or 0)) for i, s in zip(at, shard.index, strict=True)]
            return f"element {where} is {here[at]:g} on device {shard.device.id}, must be {must[at]:g}"
    return None


# --- the operations; the numbers are small integers where there is a right answer, so that it is exact ---


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    """`data` x `tensor`, two wide over `tensor` where the count is even."""
    tensor = 2 if len(devices) % 2 == 0 else 1
    return Mesh(np.array(devices).reshape(-1, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def _put(value: np.ndarray, mesh: Mesh, *spec) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def _concatenate(devices: Sequence[jax.Device]) -> Iterator[Case]:
    mesh = _mesh(devices)
    n = mesh.shape["data"]
    for spec in (("data",), ()):
        parts = _put(np.ones(n, np.float32), mesh, "data"), _put(np.ones(3 * n, np.float32), mesh, *spec)
        yield jax.jit(lambda a, b: jnp.concatenate([a, b]))(*parts), np.ones(4 * n, np.float32)


def _cumsum(devices: Sequence[jax.Device]) -> Iterator[Case]:
    mesh = _mesh(devices)
    x = np.ones((2, 16 * len(devices)), np.float32)
    yield (
        jax.jit(lambda x: jnp.cumsum(x, axis=1))(_put(x, mesh, None, ("data", "tensor"))),
        np.cumsum(x, axis=1),
    )


def _replicas(devices: Sequence[jax.Device]) -> Iterator[Case]:
    """A product contracted over a sharded dim, wanted whole: the partitioner owes an all-reduce."""
    mesh = _mesh(devices)
    n = mesh.shape["data"]
    a, b = np.arange(4 * n, dtype=np.float32).reshape(4, n), np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    jitted = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P()))

    def product(a, b):
        return jitted(_put(a, mesh, None, "data"), _put(b, mesh, "data", "tensor"))

    yield product(a, b), a @ b
    rounded = product(np.sin(a), np.cos(b))  # whatever the rounding, it must be the same on every device
    yield rounded, np.asarray(rounded.addressable_shards[0].data)


def _gradient(devices: Sequence[jax.Device]) -> Iterator[Case]:
    """d/dw of sum((w x)^2) for w = 3, x = 0, 1, ...: 840 on eight devices, 6720 if summed twice."""
    mesh = _mesh(devices)
    axes = ("data", "tensor")

    def loss(w, x):
        return jnp.sum((w * x) ** 2)

    def cast_at_entry(w, x):  # how jaxpar takes gradients
        return lax.psum(jax.grad(loss)(lax.pcast(w, axes, to="varying"), x), axes)

    def cast_by_jax(w, x):
        return jax.grad(lambda w: lax.psum(loss(w, x), axes))(w)

    w, x = np.full((), 3, np.float32), np.arange(len(devices), dtype=np.float32)
    right = np.asarray(2 * w * np.sum(x * x), np.float32)

    def both(w, x):
        return cast_at_entry(w, x), cast_by_jax(w, x)

    region = jax.shard_map(both, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
    for gradient in jax.jit(region)(_put(w, mesh), _put(x, mesh, axes)):
        yield gradient, right


def _round_trip(devices: Sequence[jax.Device]) -> Iterator[Case]:
    """ZeRO's gather and scatter, in a region manual over `data` only and a nested one over `tensor`."""
    mesh = _mesh(devices)
    n = mesh.shape["data"]

    def gather_and_scatter(shard):
        whole = lax.all_gather(shard, "data", tiled=True)
        return lax.psum_scatter(whole, "data", tiled=True)

    def region(shard):
        over_tensor = jax.shard_map(
            gather_and_scatter,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=P(None, "tensor"),
            out_specs=P(None, "tensor"),
            axis_names={"tensor"},
        )
        return over_tensor(shard)

    outer = jax.shard_map(region, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    x = np.arange(8 * n, dtype=np.float32).reshape(2 * n, 4)
    yield jax.jit(outer)(_put(x, mesh, "data", "tensor")), n * x


CHECKS: Mapping[str, Check] = {
    "concatenate of sharded arrays": _concatenate,
    "cumsum over a sharded dim": _cumsum,
    "replicas of a product over a sharded dim": _replicas,
    "gradient of a replicated parameter in shard_map": _gradient,
    "all_gather then psum_scatter in a nested shard_map": _round_trip,
}


# --- the memory of earlier passes ---


def _cache_key(devices: Sequence[jax.Device]) -> str:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {len(devices)} x {devices[0].platform}" + (
        f", XLA_FLAGS {flags}" if flags else ""
    )


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "jaxpar" / "self_check.json"


def _passed() -> dict[str, list[str]]:
    """Key -> the names of the checks that passed, so that a check added later is not taken as passed."""
    try:
        stored = json.loads(_cache_file().read_text())
        return {key: names for key, names in stored.items() if names == list(CHECKS)}
    except (OSError, RuntimeError, ValueError, AttributeError):  # no file, no home, not JSON, not a table
        return {}


def _remember(key: str) -> None:
    """Best effort: a read-only or missing home costs the next start a second check, and nothing else."""
    try:
        path = _cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**_passed(), key: list(CHECKS)}, indent=1))
        partial.replace(path)  # atomic: another process reads the old table or the new one
    except (OSError, RuntimeError):
        return
