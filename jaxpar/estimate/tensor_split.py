"""Which dim of each value in a jaxpr XLA splits over the automatic axis `tensor`: a small part of its propagation.

Parameters and constraints say it of some values; forward from those it follows for the rest. Models constrain what is
between their matrix products, so nothing has to be inferred backward.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

AXIS = "tensor"

# A dim, None: whole on every device, or FREE: a constant, which lies as whatever it meets does.
FREE = -1
Dim = int | None


def of_spec(spec: Sequence[Any]) -> Dim:
    """The dim that a `PartitionSpec` splits over `tensor`."""
    for dim, axes in enumerate(spec):
        if AXIS in (axes if isinstance(axes, tuple) else (axes,)):
            return dim
    return None


def is_split(dim: Dim) -> bool:
    return dim is not None and dim != FREE


def join(dims: Sequence[Dim]) -> Dim:
    """Of values combined element by element: one that is whole is cut to meet one that is split."""
    found = next((d for d in dims if is_split(d)), None)
    if found is not None:
        return found
    return FREE if all(d == FREE for d in dims) else None


def out_dim(eqn: Any, dims: Sequence[Dim], tensor: int) -> Dim:
    """Of the results of an equation without a body, from the dims of its operands."""
    name, shapes = eqn.primitive.name, [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    out = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
    if name == "sharding_constraint":
        return of_spec(eqn.params["sharding"].spec)
    if name == "dot_general":
        return _dot(eqn.params["dimension_numbers"], dims, [len(s) for s in shapes])
    if name == "broadcast_in_dim":
        if not shapes[0] or dims[0] == FREE:
            return FREE
        return eqn.params["broadcast_dimensions"][dims[0]] if is_split(dims[0]) else None
    if name == "iota":
        return FREE
    if not dims or not is_split(dims[0]):
        alike = [d for d, s in zip(dims, shapes, strict=True) if s == out or d == FREE]
        return join(alike) if alike else None
    dim = dims[0]
    assert dim is not None
    if name == "transpose":
        return tuple(eqn.params["permutation"]).index(dim)
    if name == "reshape":
        return _reshape(dim, shapes[0], out, tensor)
    if name in ("squeeze", "expand_dims"):
        return _reshape(dim, shapes[0], out, tensor)
    if name.startswith(("reduce_", "arg")) and "axes" in eqn.params:
        axes = eqn.params["axes"]
        return None if dim in axes else dim - sum(a < dim for a in axes)
    return dim if len(out) == len(shapes[0]) else None


def _dot(numbers: Any, dims: Sequence[Dim], ranks: Sequence[int]) -> Dim:
    """Batch dims first, then those of the left, then of the right."""
    (contracted, batch), lead = numbers, len(numbers[1][0])
    for side in (0, 1):
        if is_split(dims[side]) and dims[side] in batch[side]:
            return list(batch[side]).index(dims[side])
    place = lead
    for side in (0, 1):
        for dim in range(ranks[side]):
            if dim in contracted[side] or dim in batch[side]:
                continue
            if dim == dims[side]:
                return place
            place += 1
    return None


def _reshape(dim: int, old: Sequence[int], new: Sequence[int], tensor: int) -> Dim:
    """The dim of the new shape that starts where `dim` starts, if it can be cut as often."""
    before = prod(old[:dim])
    for place, size in enumerate(new):
        if prod(new[:place]) == before and size != 1 and size % tensor == 0:
            return place
    return None
