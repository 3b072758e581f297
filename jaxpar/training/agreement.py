"""What every process must do at the same step, though only one of them knows why."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Agreement:
    """The largest number that a process of the mesh names; 0 and None are the same. Every process calls it every time.

    One process is answered at once. Several are answered with what they named the time before: that number was
    reduced behind the step that the devices have finished by now, so that nobody waits for it.
    """

    def __init__(self, mesh: Mesh):
        line = Mesh(mesh.devices.reshape(-1), ("all",))
        self._split, replicated = NamedSharding(line, P("all")), NamedSharding(line, P())
        self._alone = len({device.process_index for device in mesh.devices.flat}) == 1
        self._largest = jax.jit(jnp.max, out_shardings=replicated)
        self._devices = len(self._split.addressable_devices)
        self._asked: Array | None = None

    def __call__(self, number: int | None) -> int | None:
        """`number`: what this process names. Returns the answer, the same on every process."""
        if self._alone:
            return number or None
        before, mine = self._asked, np.full(self._devices, number or 0, np.int32)
        self._asked = self._largest(jax.make_array_from_process_local_data(self._split, mine))
        return None if before is None else int(before.addressable_data(0)) or None
