"""What an expert's features are when its kernels are split over `tensor`: whole, split, or parts of a sum.

Rows that are multiplied by kernels split by columns have split features; by kernels split by rows they become parts
of a sum, which the exchange adds up when all experts of a token have been. In between only what acts on every feature
alone may be done. Read off the jaxpr, so that anything else is refused in place of giving other numbers.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
from jax import Array

from jaxpar.errors import PlanError

EACH_FEATURE_ALONE = frozenset(
    """abs add and cbrt ceil clamp convert_element_type copy cos div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul name ne neg not optimization_barrier or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
_LINEAR = frozenset(["convert_element_type", "copy", "name", "neg", "optimization_barrier"])


class Features(Enum):
    WHOLE = "whole"
    SPLIT = "split over `tensor`"
    PARTS = "not yet summed over `tensor`"


def _times_kernel(rows: Array, kernel: Array) -> Array:
    """Stands for a grouped matmul in what is read."""
    return rows @ kernel[0]


_marked = jax.jit(_times_kernel)


def sums_over_tensor(
    run: Callable[..., Array], rows: jax.ShapeDtypeStruct, kernels: Sequence[Array], dims: Sequence[int | None]
) -> bool:
    """Whether what `run` gives is to be summed over `tensor`; `dims`: which dim of each kernel is split.

    Raises `PlanError` for what cannot be computed on split features.
    """
    shapes = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in kernels]

    def traced(rows: Array, *kernels: Array) -> Array:
        return run(rows, *[lambda a, k=k: _marked(a, k) for k in kernels])

    closed = jax.make_jaxpr(traced)(jax.ShapeDtypeStruct(rows.shape, rows.dtype), *shapes)
    split = dict(zip(closed.jaxpr.invars[1:], dims, strict=True))
    (result,) = _walk(closed.jaxpr, {}, split)
    if result is Features.SPLIT:
        raise PlanError([f"an expert's result has features {result.value}; its last kernel must sum over them"])
    return result is Features.PARTS


def _walk(jaxpr: Any, known: dict[Any, Features], kernels: dict[Any, int | None]) -> list[Features]:
    known = dict(known)

    def features(var: Any) -> Features:
        return Features.WHOLE if hasattr(var, "val") else known.get(var, Features.WHOLE)

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if eqn.params.get("name") == _times_kernel.__name__:
            found = [_multiplied(features(eqn.invars[0]), kernels[eqn.invars[1]])]
        elif inner is not None and len(inner.invars) == len(eqn.invars):
            pairs = list(zip(inner.invars, eqn.invars, strict=True))
            inside = {i: kernels[o] for i, o in pairs if not hasattr(o, "val") and o in kernels}
            found = _walk(inner, {i: features(o) for i, o in pairs}, inside)
        else:
            found = [_applied(eqn.primitive.name, [features(v) for v in eqn.invars])] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))
    return [features(v) for v in jaxpr.outvars]


def _multiplied(rows: Features, dim: int | None) -> Features:
    """Of `[experts, in, out]` dim 1 is summed over."""
    if rows is Features.WHOLE and dim in (None, 2):
        return Features.WHOLE if dim is None else Features.SPLIT
    if rows is Features.SPLIT and dim == 1:
        return Features.PARTS
    held = "whole" if dim is None else f"split over `tensor` by its {'inputs' if dim == 1 else 'outputs'}"
    raise PlanError(
        [
            f"an expert multiplies rows whose features are {rows.value} by a kernel that is {held}; needs whole rows "
            f"and a kernel split by its outputs, then one split by its inputs: name the dims between them 'mlp'"
        ]
    )


def _applied(primitive: str, operands: list[Features]) -> Features:
    some = {f for f in operands if f is not Features.WHOLE}
    if not some:
        return Features.WHOLE
    if some == {Features.SPLIT} and primitive in EACH_FEATURE_ALONE:
        return Features.SPLIT
    summed = primitive == "add" and operands == [Features.PARTS] * 2
    if some == {Features.PARTS} and (summed or primitive in _LINEAR):
        return Features.PARTS
    raise PlanError(
        [
            f"an expert does {primitive!r} to features that are {', '.join(f.value for f in some)}; with tensor > 1 "
            f"only what acts on every feature alone may stand between its kernels, and nothing after the last"
        ]
    )
