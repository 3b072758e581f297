"""A jaxpr as a list of operations on numbered values, its calls opened."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxpar.annotate.trace import ATTEND, ROUTE
from jaxpar.estimate.kernels import CALLS, body_of, nbytes, opened
from jaxpar.parallel.vocabulary import TABLE

# What shows the same numbers in another form.
VIEWS = ("convert_element_type", "copy", "copy_p", "name", "reshape", "transpose", "squeeze", "expand_dims")


@dataclass(eq=False)
class Value:
    """`constant`: made of nothing that is given. `argument`: which one it is, or shows in another form."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    constant: bool = False
    argument: int | None = None

    @property
    def like(self) -> Any:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class Operation:
    name: str
    params: dict[str, Any]
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]


@dataclass
class Flat:
    """`ins`, `outs`: values of the whole."""

    operations: list[Operation] = field(default_factory=list)
    ins: list[Value] = field(default_factory=list)
    outs: list[Value] = field(default_factory=list)


def flatten(closed: Any) -> Flat:
    """Values that nobody needs are left out."""
    flat = Flat(ins=[_value(v.aval, argument=i) for i, v in enumerate(closed.jaxpr.invars)])
    flat.outs = _open(flat, closed.jaxpr, closed.consts, flat.ins)
    needed, kept = {id(v) for v in flat.outs}, []
    for op in reversed(flat.operations):
        if any(id(v) in needed for v in op.outs):
            needed |= {id(v) for v in op.ins}
            kept.append(op)
    flat.operations = kept[::-1]
    return flat


def _value(aval: Any, constant: bool = False, argument: int | None = None) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    return Value(shape, getattr(aval, "dtype", None), nbytes(aval), constant, argument)


def _open(flat: Flat, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
    values = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=False):
        values[var] = _value(jax.typeof(const) if not isinstance(const, np.ndarray) else const, constant=True)

    def read(atom: Any) -> Value:
        return _value(atom.aval, constant=True) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        values |= dict(zip(eqn.outvars, _results(flat, eqn, ins), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _results(flat: Flat, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    name = eqn.primitive.name
    called = str(eqn.params.get("name", ""))
    stands = name in ("jit", "pjit") and called.startswith((ATTEND, ROUTE))
    if name in CALLS and not stands and (body := body_of(eqn.params)) is not None:
        jaxpr, consts = opened(body)
        return _open(flat, jaxpr, consts, ins[len(ins) - len(jaxpr.invars) :])
    constant = all(v.constant for v in ins)
    shown = ins[0].argument if name in VIEWS and called != TABLE else None
    outs = [_value(v.aval, constant, shown) for v in eqn.outvars]
    flat.operations.append(Operation(called if stands else name, eqn.params, tuple(ins), tuple(outs)))
    return outs
