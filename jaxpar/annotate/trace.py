"""A layer as it is traced on one device, with attention and the exchange of experts as one operation each."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.model import Context
from jaxpar.plan import Plan
from jaxpar.structure import StackInfo, Structure

# Names of the calls that stand for `ctx.attend` and `ctx.route`; a number follows the latter.
ATTEND, ROUTE = "jaxpar_attend", "jaxpar_route"

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Routed:
    """One call of `ctx.route`: what an expert does to its rows."""

    run: Callable[..., Array]
    rows: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Traced:
    """`closed`: a jaxpr of the parameters, in the order of `paths`, and then of what goes through the layers."""

    name: str
    layers: int
    closed: Any
    paths: tuple[str, ...]
    routed: tuple[Routed, ...]


class _Routes(list):  # type: ignore[type-arg]
    """Hashed as itself, since it is static where a context is an argument."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class _Reading(Context):
    """A context of one device whose `attend` and `route` are single operations."""

    routes: _Routes = field(default_factory=_Routes)

    def route(self, x: Array, expert: Array, weight: Array, run: Callable[..., Array], *kernels: nnx.Param) -> Any:
        values = [kernel[...] for kernel in kernels]
        rows = jax.ShapeDtypeStruct((8, x.shape[-1]), x.dtype)
        made = jax.eval_shape(lambda rows, *ks: run(rows, *[_times(k) for k in ks]), rows, *values)

        def exchange(x: Array, weight: Array, *kernels: Array) -> Array:
            return jnp.zeros((*x.shape[:-1], made.shape[-1]), made.dtype)

        exchange.__name__ = f"{ROUTE}{len(self.routes)}"
        self.routes.append(Routed(run, rows))
        zero = jnp.zeros((), jnp.float32)
        return jax.jit(exchange)(x, weight, *values), {"routed": zero, "dropped": zero, "overflow": zero}


_DATA = ("rows", "index", "positions", "segments", "key", "depth")
jax.tree_util.register_dataclass(_Reading, _DATA, [f.name for f in fields(_Reading) if f.name not in _DATA])


def _times(kernel: Array) -> Callable[[Array], Array]:
    return lambda rows: rows @ kernel[0]


def _attention(q: Array, k: Array, v: Array, *, segments: Any, causal: bool, window: int | None) -> Array:
    return jax.jit(jaxpar_attend)(q, k, v)


def jaxpar_attend(q: Array, k: Array, v: Array) -> Array:
    """Stands for attention: heads are independent of each other."""
    return jnp.zeros_like(q)


def _no_routing(*_: Any) -> Any:
    raise AssertionError("a call of ctx.route is recorded before it comes here")


def _neighbours(x: Array, before: int, after: int) -> Array:
    return jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])


def _context(batch: Mapping[str, Array], routes: _Routes | None = None) -> _Reading:
    rows, positions = next((x.shape for x in batch.values() if x.ndim == 2), (next(iter(batch.values())).shape[0], 0))
    index = jnp.arange(positions, dtype=jnp.int32)
    return _Reading(
        rows=jnp.arange(rows, dtype=jnp.int32),
        index=index if positions else None,
        positions=batch.get("positions", jnp.broadcast_to(index, (rows, positions))) if positions else None,
        segments=batch.get("segments"),
        key=jax.random.key(0),
        depth=jnp.zeros((), jnp.int32),
        train=False,
        attention=_attention,
        neighbours=_neighbours,
        routing=_no_routing,
        rules=Plan().rules,
        sites=itertools.count(),
        routes=_Routes() if routes is None else routes,
    )


def trace(structure: Structure, shapes: Shapes) -> tuple[list[Traced], Traced]:
    """One layer of each stack, given what the one before it gives, and the ends; `shapes`: of one device's batch."""
    params = {path: jax.ShapeDtypeStruct(info.dims, info.dtype) for path, info in structure.params.items()}
    x = jax.eval_shape(lambda p, b: structure.outer(p).embed(b, _context(b)), params, dict(shapes))
    layers = []
    for stack in structure.stacks:
        traced, x = _layer(structure, stack, params, x, shapes)
        layers.append(traced)
    return layers, _ends(structure, params, x, shapes)


def _layer(structure: Structure, stack: StackInfo, params: Any, x: Any, shapes: Shapes) -> tuple[Traced, Any]:
    paths, routes = tuple(structure.stack_params(stack)), _Routes()

    def layer(values: list[Array], x: Any, batch: Mapping[str, Array]) -> Any:
        out = structure.layer(stack, dict(zip(paths, values, strict=True)))(x, _context(batch, routes))
        return out if isinstance(out, tuple) else (out, {})

    closed, made = jax.make_jaxpr(layer, return_shape=True)([params[path] for path in paths], x, dict(shapes))
    return Traced(stack.name, stack.length, closed, paths, tuple(routes)), made[0]


def _ends(structure: Structure, params: Any, x: Any, shapes: Shapes) -> Traced:
    paths = tuple(path for path, info in structure.params.items() if info.stack is None)

    def ends(values: list[Array], x: Any, batch: dict[str, Array]) -> Any:
        model = structure.outer(dict(zip(paths, values, strict=True)))
        return model.embed(batch, _context(batch)), model.head(x, batch, _context(batch))

    return Traced("ends", 1, jax.make_jaxpr(ends)([params[path] for path in paths], x, dict(shapes)), paths, ())
