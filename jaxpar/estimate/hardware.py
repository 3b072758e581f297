"""What a cluster is: `4x8xh100` is 4 nodes of 8 H100s, `2x8xh100+2x8xa100` a mixed one; others come from a file."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import Device, Link, device, device_named, kinds

__all__ = ["Cluster", "Device", "Link", "device", "device_named"]


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `devices_per_node` devices of one kind; `str` gives the notation back.

    `more`: further parts, of other kinds. `custom`: the device, if a file says what it is, and `like`, which known kind
    it is a variant of.
    """

    nodes: int
    devices_per_node: int
    kind: str
    more: tuple["Cluster", ...] = ()
    custom: Device | None = None
    like: str = ""

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Reads NODESxDEVICESxKIND, as in `4x8xh100`, or several of them joined by `+`. Raises ConfigError on any other
        form or kind."""
        first, *more = (cls._part(part, text) for part in text.split("+"))
        return replace(first, more=tuple(more))

    @classmethod
    def _part(cls, part: str, text: str) -> "Cluster":
        parts = part.strip().lower().split("x", 2)
        if len(parts) != 3 or not all(p.isascii() and p.isdecimal() and int(p) > 0 for p in parts[:2]):
            raise ConfigError(
                f"cluster {text!r}: needs NODESxDEVICESxKIND with two positive whole numbers and one kind of device, "
                f"such as '4x8xh100', and '+' between parts of different kinds (kinds: {kinds()})"
            )
        device(parts[2])
        return cls(int(parts[0]), int(parts[1]), parts[2])

    @classmethod
    def read(cls, text: str) -> "Cluster":
        """From the file of that name, if there is one, else from the notation. Raises ConfigError."""
        return cls.from_file(text) if Path(text).is_file() else cls.parse(text)

    @classmethod
    def from_file(cls, path: str | Path) -> "Cluster":
        """Reads a TOML or JSON file: `nodes`, a list of `{count, devices, kind}`, and `kinds`, a table of devices by
        name, each a known kind (`like`, else of its own name) with some fields of `Device` set. Raises ConfigError."""
        path = Path(path)
        try:
            text = path.read_text()
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cluster file {path}: {error}; needs TOML, or JSON with the ending .json") from error
        given = values.get("kinds", {})
        customs = {name: (_custom(path, name, kind), kind.get("like", name)) for name, kind in given.items()}
        parts = [_nodes(cls, path, nodes, customs) for nodes in values.get("nodes", ())]
        if not parts:
            raise ConfigError(f"cluster file {path}: no nodes; write [[nodes]] with count, devices and kind")
        return replace(parts[0], more=tuple(parts[1:]))

    @property
    def parts(self) -> tuple["Cluster", ...]:
        """The cluster as parts of one kind each."""
        return (replace(self, more=()), *self.more)

    @property
    def size(self) -> int:
        """The number of devices."""
        return sum(part.nodes * part.devices_per_node for part in self.parts)

    @property
    def device(self) -> Device:
        """Raises ConfigError for a mixed cluster, which has more than one."""
        self.check_one_kind()
        return self.custom or device(self.kind)

    @property
    def chip(self) -> str:
        """The known kind whose programs its devices run."""
        return self.like or self.kind

    @property
    def pace(self) -> Device:
        """The device that sets the pace where all wait for all: the slowest at matrix products, with the least memory,
        bandwidth and links of any part. Its `node` is a machine's size, if the kind's own domain is no larger."""
        parts = [part.device for part in self.parts]
        slowest = min(parts, key=lambda d: d.bf16_flops * d.matmul_fraction * d.sustained)
        domains = (d.node if d.node > 8 else p.devices_per_node for d, p in zip(parts, self.parts, strict=True))
        return replace(
            slowest,
            memory_bytes=min(d.memory_bytes for d in parts),
            memory_bandwidth=min(d.memory_bandwidth for d in parts),
            fp8_flops=min(d.fp8_flops for d in parts),
            fast=min((d.fast for d in parts), key=lambda link: link.bandwidth),
            slow=min((d.slow for d in parts), key=lambda link: link.bandwidth),
            node=min(domains),
        )

    @property
    def price(self) -> float | None:
        """Of the whole cluster per hour; None if the price of some kind is not given."""
        total = 0.0
        for part in self.parts:
            if (each := part.device.price) is None:
                return None
            total += each * part.size
        return total

    def check_one_kind(self) -> None:
        """Raises ConfigError for a mixed cluster."""
        if self.more:
            raise ConfigError(f"cluster {self} is mixed: compile once for each, {' and '.join(map(str, self.parts))}")

    def __str__(self) -> str:
        return "+".join([f"{self.nodes}x{self.devices_per_node}x{self.kind}", *map(str, self.more)])


def _custom(path: Path, name: str, given: Mapping[str, Any]) -> Device:
    base = device(given.get("like", name))
    changed = {field: value for field, value in given.items() if field != "like"}
    links = {level: changed.pop(level) for level in ("fast", "slow") if level in changed}
    known, of_links = ({f.name for f in fields(kind)} for kind in (Device, Link))
    unknown = set(changed) - known
    unknown |= {level for level, link in links.items() if not isinstance(link, Mapping) or set(link) - of_links}
    if unknown:
        raise ConfigError(
            f"cluster file {path}, kind {name!r}: cannot read {', '.join(sorted(unknown))}; known: "
            f"{', '.join(sorted(known))}, where fast and slow have {' and '.join(sorted(of_links))}"
        )
    changed |= {level: replace(getattr(base, level), **link) for level, link in links.items()}
    return replace(base, **{"name": name if "like" in given else base.name, **changed})


def _nodes(
    cls: type[Cluster], path: Path, given: Mapping[str, Any], customs: Mapping[str, tuple[Device, str]]
) -> Cluster:
    wrong = set(given) != {"count", "devices", "kind"}
    if wrong or not all(isinstance(given[n], int) and given[n] > 0 for n in ("count", "devices")):
        raise ConfigError(
            f"cluster file {path}: nodes need count and devices, whole and positive, and kind; found {dict(given)}"
        )
    kind = given["kind"]
    if kind not in customs:
        device(kind)
    custom, like = customs.get(kind, (None, ""))
    return cls(given["count"], given["devices"], kind, custom=custom, like=like)
