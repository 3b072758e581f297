"""Which positions of a row each device of `seq` holds, and what attention may be asked for there.

A row is cut into `2 R` chunks for R groups of devices, and group g holds chunks g and 2 R - 1 - g: under a causal mask
the early positions have little to do and the late ones much, and so every group has the same (zigzag order, Brandon
et al., Striped Attention, 2023, for the idea; the head-tail form is Megatron-LM's). Inside a group of u devices,
Ulysses splits these positions evenly. R = 1 is the natural order. All arrays with positions travel in this order.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpar import collectives
from jaxpar.plan import Plan


@dataclass(frozen=True)
class SequenceLayout:
    """`groups` x `members` devices of `seq`, the members of a group next to each other; `gathers`: each device holds
    its queries and gathers all keys, instead of sending keys around."""

    groups: int
    members: int
    gathers: bool = False

    @property
    def devices(self) -> int:
        return self.groups * self.members

    @property
    def multiple(self) -> int:
        """Of how many positions a row must be a multiple."""
        return (2 if self.groups > 1 else 1) * self.devices

    @property
    def natural(self) -> bool:
        """Whether devices hold positions in the order of the row."""
        return self.groups == 1

    def order(self, positions: int) -> np.ndarray:
        """int32[device, position]: which positions of a row each device holds."""
        if self.groups == 1:
            return np.arange(positions, dtype=np.int32).reshape(self.devices, -1)
        chunks = np.arange(positions, dtype=np.int32).reshape(2 * self.groups, -1)
        held = np.concatenate([chunks[: self.groups], chunks[: self.groups - 1 : -1]], axis=1)
        return held.reshape(self.devices, -1)

    def part_starts(self, group_positions: int) -> np.ndarray:
        """int32[group, part]: where in the row each contiguous part that a group holds starts."""
        if self.groups == 1:
            return np.zeros((1, 1), np.int32)
        chunk = group_positions // 2
        first = np.arange(self.groups, dtype=np.int32)
        return np.stack([first, 2 * self.groups - 1 - first], axis=1) * chunk

    @classmethod
    def of(cls, plan: Plan, devices: int) -> "SequenceLayout":
        """That of a plan with so many devices on `seq`."""
        if plan.attention == "ulysses":
            return cls(1, devices)
        return cls(devices // plan.ulysses, plan.ulysses, gathers=plan.attention == "allgather")

    @property
    def parts(self) -> int:
        return 1 if self.groups == 1 else 2

    @property
    def stretches(self) -> int:
        """In how many equal pieces that are each contiguous in the row the positions of a device lie."""
        return 2 if self.groups > 1 and self.members % 2 else 1

    def group_index(self) -> Array:
        return jnp.asarray(collectives.axis_index("seq")) // self.members
