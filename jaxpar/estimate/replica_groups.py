"""From the devices that a collective joins to the mesh axes it runs over.

XLA prints the groups in three notations: lists `{{0,1},{2,3}}`, a reshaped range `[4,2]<=[2,4]T(1,0)`, and
mesh axes `mesh['a'=4,'b'=2] {'a'}` whose names need not be ours. All become one array, device -> group, and
are compared with what our own axes would give. Partition i is device `mesh.devices.ravel()[i]`.
"""

import re
from functools import lru_cache

import numpy as np

Axes = tuple[tuple[str, int], ...]  # (name, size), in the mesh's order

_GROUPS = re.compile(r"replica_groups=")
_RANGE = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= \{))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([^'=,:]+)'?=(\d+)")
_PART = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def collective_axes(attributes: str, axes: Axes) -> tuple[tuple[str, ...], int]:
    """The mesh axes a collective runs over, and the size of its (largest) group.

    A part of an axis is named as XLA names it, `data:(pre)size`: `data:(2)4` is the inner 4 of an axis of 8,
    `data:(1)2` the outer 2. Groups that no axes explain give every axis they vary along, marked `data?`.
    Groups of one device give ().
    """
    if "channel_id=" not in attributes:
        return (), 1  # groups of replicas, of which a program over a mesh has one
    if "source_target_pairs=" in attributes:
        pairs = attributes.split("source_target_pairs=", 1)[1].split("}}", 1)[0] + "}"
        return _permuted_axes(pairs, axes), 2
    found = _GROUPS.search(attributes)
    return _grouped_axes(_notation(attributes[found.end() :]) if found else "{}", axes)


def _notation(text: str) -> str:
    """The text of the groups alone, without the attributes that follow."""
    for pattern in (_RANGE, _MESH):
        if found := pattern.match(text):
            return found.group()
    return "{}" if text.startswith("{}") else text.split("}}", 1)[0] + "}}"


@lru_cache(maxsize=4096)
def _permuted_axes(pairs: str, axes: Axes) -> tuple[str, ...]:
    ends = np.array([[int(a), int(b)] for a, b in _PAIR.findall(pairs)], dtype=np.int64).reshape(-1, 2)
    coords = np.unravel_index(ends, [size for _, size in axes])
    return tuple(name for (name, _), c in zip(axes, coords, strict=True) if np.any(c[:, 0] != c[:, 1]))


@lru_cache(maxsize=4096)
def _grouped_axes(text: str, axes: Axes) -> tuple[tuple[str, ...], int]:
    sizes = tuple(size for _, size in axes)
    groups = _first_members(_groups(text, int(np.prod(sizes))))
    group_size = int(np.bincount(groups).max())
    coords = np.unravel_index(np.arange(len(groups)), sizes)
    found = [_part(np.unique(c[groups == 0]), size) for c, size in zip(coords, sizes, strict=True)]
    parts = [part for part in found if part is not None]
    if len(parts) == len(axes) and np.array_equal(groups, _first_members(_groups_over(sizes, parts))):
        named = (_part_name(*axis, part) for axis, part in zip(axes, parts, strict=True) if part[1] > 1)
        return tuple(named), group_size
    varying = [name for (name, _), c in zip(axes, coords, strict=True) if np.any(c != c[groups])]
    return tuple(f"{name}?" for name in varying), group_size


def _part(coords: np.ndarray, size: int) -> tuple[int, int] | None:
    """The (pre, size) part of an axis that has these coordinates, or None when no single part has."""
    count = len(coords)
    stride = int(coords[1] - coords[0]) if count > 1 else size
    if not np.array_equal(coords, np.arange(count) * stride) or size % (stride * count):
        return None
    return size // (stride * count), count


def _part_name(name: str, size: int, part: tuple[int, int]) -> str:
    return name if part[1] == size else f"{name}:({part[0]}){part[1]}"


def _groups_over(sizes: tuple[int, ...], parts: list[tuple[int, int]]) -> np.ndarray:
    """Device -> group when those that differ only in these parts of the axes are together."""
    coords = np.unravel_index(np.arange(int(np.prod(sizes))), sizes)
    rest = []
    for c, size, (pre, count) in zip(coords, sizes, parts, strict=True):
        stride = size // (pre * count)
        rest.append(c - (c // stride) % count * stride)
    return np.ravel_multi_index(rest, sizes)


def _first_members(groups: np.ndarray) -> np.ndarray:
    """The same grouping, each group named by its smallest device, so that two groupings can be compared."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return first[inverse]


def _groups(text: str, devices: int) -> np.ndarray:
    """Device -> some number that names its group, from any of the notations."""
    if text == "{}":
        return np.zeros(devices, np.int64)
    if found := _MESH.match(text):
        return _mesh_groups(*found.groups())
    if found := _RANGE.match(text):
        listed = _range(found).reshape(_ints(found.group(1))).tolist()
    else:
        listed = [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    groups = np.arange(devices) + devices  # a device in no group is alone
    for number, group in enumerate(listed):
        groups[group] = number
    return groups


def _range(found: re.Match) -> np.ndarray:
    order = np.arange(int(np.prod(_ints(found.group(2))))).reshape(_ints(found.group(2)))
    return order.transpose(_ints(found.group(3))) if found.group(3) else order


def _mesh_groups(axes_text: str, ids_text: str | None, parts_text: str) -> np.ndarray:
    axes = [(name, int(size)) for name, size in _AXIS.findall(axes_text)]
    chosen = {name: (pre, size) for name, pre, size in _PART.findall(parts_text)}
    parts = []
    for name, size in axes:
        pre, count = chosen.get(name, (str(size), "1"))
        parts.append((int(pre or 1), int(count or size)))
    by_position = _groups_over(tuple(size for _, size in axes), parts)
    if ids_text is None:
        return by_position
    groups = np.empty_like(by_position)
    groups[_device_ids(ids_text)] = by_position
    return groups


def _device_ids(text: str) -> np.ndarray:
    """`0,2,1,3`, or a transposed range `[2,4]T(1,0)`."""
    if found := _RANGE.match(f"[0]<={text}"):
        return _range(found).ravel()
    return np.array(_ints(text))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
