"""A jaxpr as the kernels that XLA makes of it, with the bytes of each value on one device.

Calls are opened, so that what stands on both sides of one can be fused. A loop stays one kernel: what its body needs
beside what goes in and comes out is its `inner` bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxpar.estimate.tensor_split import FREE, Dim, join, of_spec, out_dim

CALLS = (
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vmap_call", "custom_lin", "shard_map",
)  # fmt: skip


_WIDE = np.dtype(np.float32)


@dataclass(frozen=True)
class Kernel:
    """`name`: of the primitive. `ins`, `outs`: numbers of values. `inner`: bytes that live while it runs."""

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    inner: int = 0


@dataclass
class Kernels:
    """In the order of the trace. `bytes`: of each value on one device; `ins`, `outs`: of the whole."""

    kernels: list[Kernel] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    ins: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)


Inner = Callable[[Kernels, int, int], int]

# A kernel that only makes a copy of another dtype.
COPY = "copy in float32"


def kernels_of(
    closed: Any, dims: Sequence[Dim], tensor: int, inner: Inner, widens: bool = False
) -> tuple[Kernels, list[Dim]]:
    """-> the kernels, and which dim of each result is split over `tensor` devices; `dims`: of each input.

    `inner(body, consts, carried)`: the bytes that a loop's body needs; of its inputs the first are constants, then
    come those carried. `widens`: products that contract the first dims of both operands, those of the weights'
    gradients, take them in float32."""
    return _Flat(tensor, inner, widens).run(closed, dims)


@dataclass
class _Flat:
    tensor: int
    inner: Inner
    widens: bool

    def run(self, closed: Any, dims: Sequence[Dim]) -> tuple[Kernels, list[Dim]]:
        """-> the kernels, and the dims of the results."""
        found = Kernels()
        jaxpr, consts = opened(closed)
        scope = _Scope(self, found, self.tensor)
        ins = [scope.new(v, d) for v, d in zip(jaxpr.invars, dims, strict=True)]
        found.ins = [n for n, _ in ins]
        results = scope.open(jaxpr, consts, ins)
        found.outs = [n for n, _ in results]
        return found, [d for _, d in results]


Value = tuple[int, Dim]


@dataclass
class _Scope:
    """`tensor`: into how many parts what is split is cut; 1 in a region that sees its own part alone."""

    flat: _Flat
    found: Kernels
    tensor: int
    # Copies in float32, by value: those who read one share it.
    wide: dict[int, int] = field(default_factory=dict)

    def new(self, var: Any, dim: Dim) -> Value:
        parts = self.tensor if dim is not None and dim != FREE else 1
        self.found.bytes.append(nbytes(var.aval) // parts)
        return len(self.found.bytes) - 1, dim

    def open(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        for v, c in zip(jaxpr.constvars, consts, strict=False):
            values[v] = self.new(v, FREE if np.ndim(c) == 0 else None)

        def read(atom: Any) -> Value:
            return self.new(atom, FREE) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [read(v) for v in eqn.invars])
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in CALLS and (body := body_of(eqn.params)) is not None:
            return self._call(eqn, body, ins)
        if name in ("scan", "while", "cond"):
            return self._loop(eqn, ins)
        dims = [d for _, d in ins]
        if name == "dot_general" and self.flat.widens and _leads(eqn):
            ins = [self._widened(v, value) for v, value in zip(eqn.invars, ins, strict=True)]
        dim = out_dim(eqn, dims, self.tensor)
        outs = [self.new(v, dim) for v in eqn.outvars]
        name = "reshard" if name == "sharding_constraint" and dims[0] not in (dim, FREE) else name
        self.found.kernels.append(Kernel(name, tuple(n for n, _ in ins), tuple(n for n, _ in outs)))
        return outs

    def _widened(self, var: Any, value: Value) -> Value:
        """The value's copy in float32; itself, if it is as wide."""
        n, dim = value
        if var.aval.dtype.itemsize >= _WIDE.itemsize:
            return value
        if n not in self.wide:
            self.found.bytes.append(self.found.bytes[n] * _WIDE.itemsize // var.aval.dtype.itemsize)
            self.wide[n] = len(self.found.bytes) - 1
            self.found.kernels.append(Kernel(COPY, (n,), (self.wide[n],)))
        return self.wide[n], dim

    def _call(self, eqn: Any, body: Any, ins: list[Value]) -> list[Value]:
        jaxpr, consts = opened(body)
        if eqn.primitive.name != "shard_map" or self.tensor == 1:
            return self.open(jaxpr, consts, ins[len(ins) - len(jaxpr.invars) :])
        # Inside, every value is a device's own part. The numbers stay: a part is what there is of the whole.
        own = _Scope(self.flat, self.found, 1, self.wide)
        results = own.open(jaxpr, consts, [(n, None) for n, _ in ins])
        return [(n, of_spec(spec)) for (n, _), spec in zip(results, eqn.params["out_specs"], strict=True)]

    def _loop(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        flat = _Flat(self.tensor, self.flat.inner, self.flat.widens)
        if name == "cond":
            runs = [flat.run(b, [d for _, d in ins[1:]]) for b in params["branches"]]
            inner = max(self.flat.inner(body, len(ins) - 1, 0) for body, _ in runs)
            dims = [join(ds) for ds in zip(*(ds for _, ds in runs), strict=True)]
        else:
            body = params["jaxpr"] if name == "scan" else params["body_jaxpr"]
            skip = 0 if name == "scan" else params["cond_nconsts"]
            consts, carried = (params["body_nconsts"], len(eqn.outvars)) if name == "while" else _scanned(params)
            ins = ins[skip:]
            given = _loop_dims(name, ins, consts, carried)
            for _ in range(3):
                run, results = flat.run(body, given)
                new = [r if g == FREE else g for g, r in zip(given[consts:], results[:carried], strict=False)]
                if new == given[consts : consts + carried]:
                    break
                given[consts : consts + carried] = new
            inner = self.flat.inner(run, consts, carried)
            stacked = [d if d is None or d == FREE else d + 1 for d in results[carried:]]
            dims = given[consts : consts + carried] + stacked
        outs = [self.new(v, d) for v, d in zip(eqn.outvars, dims, strict=True)]
        self.found.kernels.append(Kernel(name, tuple(n for n, _ in ins), tuple(n for n, _ in outs), inner))
        return outs


def _leads(eqn: Any) -> bool:
    """Whether a product contracts the first dims of both operands."""
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    return not batch and all(sorted(dims) == list(range(len(dims))) for dims in (left, right))


def _loop_dims(name: str, ins: Sequence[Value], consts: int, carried: int) -> list[Dim]:
    """Of the inputs of a loop's body: what is scanned over loses its first dim."""
    dims = [d for _, d in ins]
    for i in range(consts + carried, len(dims)):
        dim = dims[i]
        if dim is not None and dim != FREE:
            dims[i] = None if dim == 0 else dim - 1
    return dims


def _scanned(params: Any) -> tuple[int, int]:
    """How many constants a scan has, and how many values it carries. jax 0.12 has them in trees."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def opened(closed: Any) -> tuple[Any, Sequence[Any]]:
    """-> jaxpr, constants."""
    return (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())


def body_of(params: Any) -> Any:
    """The jaxpr that a call of `CALLS` runs; None if it has none."""
    return next((params[name] for name in ("jaxpr", "call_jaxpr", "call", "fun_jaxpr") if name in params), None)


def nbytes(aval: Any) -> int:
    """0 for what is no array, and for random keys, which are small."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize
