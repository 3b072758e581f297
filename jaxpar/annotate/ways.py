"""The ways in which one operation of a jaxpar can be computed on parts: how each operand lies, and what comes out.

A value is whole, or split along a dim, or one of the parts of a sum over `tensor`. An operand that is whole but used
with something that is split has a gradient in parts. Nothing here gathers: who makes a value and who reads it agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from jaxpar.annotate.flat import Operation
from jaxpar.annotate.trace import ATTEND, ROUTE, Routed
from jaxpar.errors import PlanError
from jaxpar.parallel.expert_split import EACH_FEATURE_ALONE, sums_over_tensor

# How a value lies: one of these, or the number of the dim that is split.
WHOLE, PARTS, GRADIENT_IN_PARTS, ANY = "whole", "parts of a sum", "whole, its gradient in parts", "any"
State = str | int

_ALIKE = EACH_FEATURE_ALONE | {"atan2", "copy_p", "nextafter", "pvary", "clamp"}
_SUMS = ("reduce_sum", "reduce_max", "reduce_min")


@dataclass(frozen=True)
class Way:
    """`ins`: as each operand must lie (`ANY`: as it may, a constant); `out`: as all results do."""

    ins: tuple[State, ...]
    out: State


def ways(op: Operation, tensor: int, routed: Sequence[Routed]) -> list[Way]:
    """All of them; the first keeps everything whole. What is not known is whole."""
    if all(v.constant for v in op.ins):
        return [Way((ANY,) * len(op.ins), ANY)]
    found = [Way(tuple(ANY if v.constant else WHOLE for v in op.ins), WHOLE)]
    for ins, out in _split(op, tensor, routed):
        if all(v.constant or _divides(v.shape, s, tensor) for v, s in zip(op.ins, ins, strict=True)):
            found.append(Way(tuple(ANY if v.constant else s for v, s in zip(op.ins, ins, strict=True)), out))
    return list(dict.fromkeys(found))


def _divides(shape: tuple[int, ...], state: State, tensor: int) -> bool:
    return not isinstance(state, int) or (shape[state] % tensor == 0 and shape[state] > 0)


def _split(op: Operation, tensor: int, routed: Sequence[Routed]) -> list[tuple[tuple[State, ...], State]]:
    name = op.name
    if name == "dot_general":
        return _product(op)
    if name == ATTEND:
        return _attention(op, tensor)
    if name.startswith(ROUTE):
        return _experts(op, tensor, routed[int(name.removeprefix(ROUTE))])
    if name in _ALIKE:
        return _elementwise(op)
    one = {
        "broadcast_in_dim": _broadcast,
        "reshape": _reshape,
        "transpose": _transpose,
        "squeeze": _squeeze,
        "expand_dims": _expand,
        "slice": _slice,
        "pad": _pad,
        "split": _along_another,
        "concatenate": _along_another,
        "cumsum": _along_another,
        "gather": _lookup,
        **dict.fromkeys(_SUMS, _reduce),
    }.get(name)
    return [] if one is None else one(op)


def _product(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
    free_left = [d for d in range(len(op.ins[0].shape)) if d not in (*left, *left_batch)]
    free_right = [d for d in range(len(op.ins[1].shape)) if d not in (*right, *right_batch)]
    batch = len(left_batch)
    found: list[tuple[tuple[State, ...], State]] = []
    found += [((i, j), at) for at, (i, j) in enumerate(zip(left_batch, right_batch, strict=True))]
    found += [((d, GRADIENT_IN_PARTS), batch + at) for at, d in enumerate(free_left)]
    found += [((GRADIENT_IN_PARTS, d), batch + len(free_left) + at) for at, d in enumerate(free_right)]
    return found + [((i, j), PARTS) for i, j in zip(left, right, strict=True)]


def _attention(op: Operation, tensor: int) -> list[tuple[tuple[State, ...], State]]:
    """By heads; few heads of keys and values may be whole on every device, if each serves whole queries of one."""
    heads, kv_heads = op.ins[0].shape[2], op.ins[1].shape[2]
    if kv_heads % tensor == 0:
        return [((2, 2, 2), 2)]
    whole = heads % tensor == 0 and tensor % kv_heads == 0
    return [((2, GRADIENT_IN_PARTS, GRADIENT_IN_PARTS), 2)] if whole else []


def _experts(op: Operation, tensor: int, routed: Routed) -> list[tuple[tuple[State, ...], State]]:
    """Kernels split by what they make, or by what they take: `ctx.route` adds up once what comes of that."""
    kernels = op.ins[2:]
    found: list[tuple[tuple[State, ...], State]] = []
    for dims in product((2, 1), repeat=len(kernels)):
        try:
            sums_over_tensor(routed.run, routed.rows, [k.like for k in kernels], dims)
        except PlanError:
            continue
        found.append(((GRADIENT_IN_PARTS, GRADIENT_IN_PARTS, *dims), PARTS))
    return found


def _elementwise(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    """Operands of one element along the dim that is split serve all parts."""
    out = op.outs[0].shape
    if any(v.shape and len(v.shape) != len(out) for v in op.ins):
        return []
    split = [d for d, size in enumerate(out) if size > 1]
    return [(tuple(d if v.shape and v.shape[d] == out[d] else GRADIENT_IN_PARTS for v in op.ins), d) for d in split]


def _broadcast(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    shape, dims = op.ins[0].shape, op.params["broadcast_dimensions"]
    kept = {d: at for at, d in enumerate(dims) if shape[at] == op.outs[0].shape[d]}
    rest: list[State] = [WHOLE] * (len(op.ins) - 1)
    return [((kept.get(d, GRADIENT_IN_PARTS), *rest), d) for d, size in enumerate(op.outs[0].shape) if size > 1]


def _reshape(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    """A dim that leads those it is merged with, or is cut into, stays split as the leading one."""
    old, new = op.ins[0].shape, op.outs[0].shape
    before = {prod(old[:d]): d for d in range(len(old)) if old[d] > 1}
    leading = [(before[prod(new[:d])], d) for d in range(len(new)) if new[d] > 1 and prod(new[:d]) in before]
    rest: list[State] = [WHOLE] * (len(op.ins) - 1)
    return [((i, *rest), d) for i, d in leading if old[i] % new[d] == 0 or new[d] % old[i] == 0]


def _transpose(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    return [((i,), d) for d, i in enumerate(op.params["permutation"])]


def _squeeze(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    kept = [d for d in range(len(op.ins[0].shape)) if d not in op.params["dimensions"]]
    return [((i,), d) for d, i in enumerate(kept)]


def _expand(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    old = [d for d in range(len(op.outs[0].shape)) if d not in op.params["dimensions"]]
    return [((i,), d) for i, d in enumerate(old)]


def _slice(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    return [((d,), d) for d, (a, b) in enumerate(zip(op.ins[0].shape, op.outs[0].shape, strict=True)) if a == b]


def _pad(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    return [((d, WHOLE), d) for d, c in enumerate(op.params["padding_config"]) if tuple(c) == (0, 0, 0)]


def _along_another(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    """Operations along one dim, which others may be split beside."""
    axis = op.params["axis"] if "axis" in op.params else op.params["dimension"]
    return [((d,) * len(op.ins), d) for d in range(len(op.ins[0].shape)) if d != axis]


def _lookup(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    """Rows of a table: split by features they are so too, split by rows each device has some of them."""
    table, numbers = op.ins[0].shape, op.params["dimension_numbers"]
    sizes, offset = op.params["slice_sizes"], numbers.offset_dims
    if numbers.collapsed_slice_dims != (0,) or tuple(sizes[1:]) != table[1:] or len(offset) != len(table) - 1:
        return []
    by_feature: list[tuple[tuple[State, ...], State]] = [((d, WHOLE), offset[d - 1]) for d in range(1, len(table))]
    return [*by_feature, ((0, WHOLE), PARTS)]


def _reduce(op: Operation) -> list[tuple[tuple[State, ...], State]]:
    axes = op.params["axes"]
    kept = [d for d in range(len(op.ins[0].shape)) if d not in axes]
    found: list[tuple[tuple[State, ...], State]] = [((i,), d) for d, i in enumerate(kept)]
    return found + [((i,), PARTS) for i in axes]
