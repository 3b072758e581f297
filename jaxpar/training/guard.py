"""Whether what must be equal on several devices still is, bit for bit.

A faulty device, or a collective that the compiler left out, makes replicas drift apart, and the loss does not show it.
"""

import time
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import UInt32

from jaxpar import offload
from jaxpar.errors import TrainingError
from jaxpar.run import Run
from jaxpar.state import TrainState
from jaxpar.training.callbacks import Callback, Loop, Record


class Guard(Callback):
    """Compares the replicas of every leaf of the state, every so many steps and at the end, before it is saved.

    Records `guard_seconds`, which are in no step's time, and `guard_share` of the time of the steps between. Raises
    `TrainingError` that names every leaf and device that differ.
    """

    def __init__(self, every: int):
        self._every, self._last, self._seconds = every, 0, 0.0

    def on_start(self, loop: Loop) -> None:
        self._replicas, self._last = Replicas(loop.run), loop.step

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        self._seconds = record.get("seconds", self._seconds)

    def on_step(self, loop: Loop) -> None:
        if loop.step % self._every == 0:
            self._check(loop)

    def on_end(self, loop: Loop) -> None:
        if self._last != loop.step:
            self._check(loop)

    def _check(self, loop: Loop) -> None:
        loop.settle()
        started = time.perf_counter()
        if found := self._replicas.differences(loop.state):
            raise TrainingError(
                f"values that must be the same on several devices are not, at step {loop.step} "
                f"(last compared at step {self._last}):\n" + "\n".join(f"  - {line}" for line in found) + "\n"
                "A device or a collective computed something wrong. Go on from the last checkpoint, without these "
                "devices; trainer.guard_every=0 turns this check off"
            )
        seconds = time.perf_counter() - started
        between = self._every * self._seconds or seconds
        loop.record(loop.step, {"guard_seconds": seconds, "guard_share": seconds / between})
        self._last = loop.step


class Replicas:
    """Compares a run's states by one number for each leaf and device."""

    def __init__(self, run: Run):
        self._mesh = run.mesh
        leaves = jax.tree_util.tree_flatten_with_path(_without_keys(run.abstract_state))[0]
        copied = [(path, leaf, _copied_over(leaf, run.mesh)) for path, leaf in leaves]
        self._index = [i for i, (_, _, axes) in enumerate(copied) if axes]
        self.axes = {jax.tree_util.keystr(path, simple=True, separator="/"): axes for path, _, axes in copied if axes}
        """The mesh axes over which each leaf is replicated."""
        shapes = [copied[i][1] for i in self._index]
        self._hashes = _hashes(run.mesh, shapes).lower(shapes).compile() if shapes else None

    def differences(self, state: TrainState) -> list[str]:
        """A line for each leaf and device whose copy is not like the others, the same on every process."""
        if self._hashes is None:
            return []
        leaves = jax.tree.leaves(_without_keys(state))
        flat = np.asarray(self._hashes([leaves[i] for i in self._index]).addressable_data(0))
        hashes = flat.reshape(*self._mesh.devices.shape, -1)
        return [
            line
            for leaf, (name, axes) in enumerate(self.axes.items())
            for line in _odd_ones(name, hashes[..., leaf], [self._mesh.axis_names.index(a) for a in axes], self._mesh)
        ]


def _without_keys(state: TrainState) -> Any:
    """Random keys as the numbers that they are."""

    def words(x: Any) -> Any:
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        if isinstance(x, Array):
            return jax.random.key_data(x)
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)

    return jax.tree.map(words, state)


def _copied_over(leaf: Any, mesh: Mesh) -> tuple[str, ...]:
    named = {a for axes in leaf.sharding.spec for a in ((axes,) if isinstance(axes, str) else axes or ())}
    return tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in named)


def _hashes(mesh: Mesh, leaves: list[Any]) -> Any:
    """jit of: leaves -> uint32[devices in mesh order, leaves], on every process. Each device reads its own copies."""

    def local(shards: list[Array]) -> UInt32[Array, "1 leaves"]:
        at_hand = [offload.to_device(x) if away else x for x, away in zip(shards, on_host, strict=True)]
        return jnp.stack([fingerprint(x) for x in at_hand])[None]

    # Nothing is said to vary (check_vma): that the copies are equal is what is in doubt.
    specs = [leaf.sharding.spec for leaf in leaves]
    on_host = [offload.is_on_host(leaf.sharding) for leaf in leaves]
    whole = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
    return jax.jit(whole, out_shardings=NamedSharding(mesh, P()))


def fingerprint(x: Array) -> UInt32[Array, ""]:
    """The sum of all 32-bit words, each times an odd number that follows from its place.

    An odd factor loses no bit, so a single word that changes always shows; two that change do not with a chance of
    about 2^-32.
    """
    words = _words(x).reshape(-1)
    # Mixed (as in MurmurHash3): with factors in equal steps, values that move symmetrically would cancel.
    place = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1)
    place = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(words * ((place ^ (place >> 13)) | jnp.uint32(1)), dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, "..."]:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


def _odd_ones(name: str, hashes: np.ndarray, copied: list[int], mesh: Mesh) -> list[str]:
    """`hashes`: of one leaf, by place in the mesh, whose axes `copied` hold copies."""
    other = [i for i in range(hashes.ndim) if i not in copied]
    copies = prod(hashes.shape[i] for i in copied)
    groups = hashes.transpose(other + copied).reshape(-1, copies)
    devices = mesh.devices.transpose(other + copied).reshape(-1, copies)
    return [
        line
        for values, where in zip(groups, devices, strict=True)
        if values.min() != values.max()
        for line in _lines(name, values, where)
    ]


def _lines(name: str, values: np.ndarray, devices: np.ndarray) -> list[str]:
    (most, count), *_ = Counter(values.tolist()).most_common()
    if 2 * count <= len(values):
        return [f"{name}: its copies on devices {_ids(devices)} differ, and no value is in the majority"]
    odd = values != most
    like = f"holds other bits than {'device' if count == 1 else 'devices'} {_ids(devices[~odd])}"
    return [f"{name}: device {d.id} (process {d.process_index}, {d.device_kind}) {like}" for d in devices[odd]]


def _ids(devices: np.ndarray, most: int = 8) -> str:
    ids = [str(d.id) for d in devices]
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")
