"""How long a collective takes, by where its devices lie: inside one fast domain, or across several."""

from dataclasses import dataclass
from math import ceil, log2

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import Device


@dataclass(frozen=True)
class Group:
    """The devices of one collective: `size` of them, `inside` of which share a domain; `alone`: how many of a domain's
    devices use its links to the others at the same time for each of them."""

    size: int
    inside: int

    @property
    def domains(self) -> int:
        return ceil(self.size / self.inside)


def place(sizes: dict[str, int], node: int) -> dict[str, Group]:
    """The group of each axis. `sizes`: from the axis whose devices are next to each other to the outermost one."""
    groups, stride = {}, 1
    for axis, size in sizes.items():
        groups[axis] = Group(size, max(1, min(size, node // stride)))
        stride *= size
    return groups


@dataclass(frozen=True)
class Links:
    """Seconds of collectives. Sizes are bytes of the whole: what a device has after an all-gather, or before a
    reduce-scatter."""

    device: Device
    constants: Constants

    def gather(self, size: float, group: Group) -> float:
        """All-gather or reduce-scatter by rings: each device passes on all but its own part. A domain's devices of one
        group use all their links to other domains at once."""
        if group.size <= 1:
            return 0.0
        return size * (group.size - 1) / group.size / self._ring(group) + self._hops(group)

    def reduce(self, size: float, group: Group) -> float:
        """All-reduce: a reduce-scatter and an all-gather by rings or, where that is sooner, by trees, which take fewer
        hops."""
        if group.size <= 1:
            return 0.0
        moved = 2.0 * size * (group.size - 1) / group.size / self._ring(group)
        d = self.device
        tree = 2.0 * (log2(group.inside) * d.fast.latency + ceil(log2(group.domains)) * d.slow.latency)
        return moved + min(2.0 * self._hops(group), tree)

    def exchange(self, size: float, group: Group) -> float:
        """All-to-all of `size` bytes on each device: to each other one an equal part."""
        if group.size <= 1:
            return 0.0
        d, c, part = self.device, self.constants, size / group.size
        near = part * (group.inside - 1) / (d.fast.bandwidth * c.fast)
        far = part * (group.size - group.inside) / (d.slow.bandwidth * c.slow)
        latency = d.slow.latency if group.domains > 1 else d.fast.latency
        return max(near, far) + latency * log2(group.size)

    def send(self, size: float, group: Group) -> float:
        """From a device to its neighbour in the group; all at once, so that the slowest sets the time."""
        if group.size <= 1:
            return 0.0
        d, c = self.device, self.constants
        if group.domains > 1:
            return size / (d.slow.bandwidth * c.slow) + d.slow.latency
        return size / (d.fast.bandwidth * c.fast) + d.fast.latency

    def _ring(self, group: Group) -> float:
        """Bytes/s at which all devices of the group pass on at once."""
        near, far = self.device.fast.bandwidth * self.constants.fast, self.device.slow.bandwidth * self.constants.slow
        if group.domains == 1:
            return near
        return min(near, far * group.inside) if group.inside > 1 else far

    def _hops(self, group: Group) -> float:
        far = group.domains - 1
        return (group.size - 1 - far) * self.device.fast.latency + far * self.device.slow.latency
