"""A layer's backward cut in two: the input's gradient now, the weights' gradients later, nothing computed twice.

The backward is traced to a flat jaxpr. Matrix products that only the weights' gradients need, what they are made from
and what follows from them, are the later part; all else is the first part, which hands over what the later one reads
and cannot have from what is stored or alive already. Weights, and what follows from weights alone, are never handed
over. Source: Qi et al., Zero Bubble Pipeline Parallelism (2024), for the idea of the cut.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array
from jax.extend import core

from jaxpar import collectives
from jaxpar.executor.layer import LayerGradient, Totals
from jaxpar.model import Context
from jaxpar.structure import Params

Var = Any
Equation = Any

_CALLS = ("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call")


@dataclass(frozen=True)
class Split:
    """`first(args) -> (dx, handed)` and `later(args without dy, handed) -> grads`, on flat lists of arrays.

    `handed`: shapes and dtypes of what lies between the two. `weights_later`: whether the later part reads weights.
    """

    first: Callable[[list[Array]], tuple[list[Array], list[Array]]]
    later: Callable[[list[Array], list[Array]], list[Array]]
    handed: list[jax.ShapeDtypeStruct]
    weights_later: bool


def split(
    backward: Callable[..., tuple[list[Array], list[Array]]],
    weights: Sequence[Array],
    saved: Sequence[Array],
    shared: Sequence[Array],
    dy: Sequence[Array],
) -> Split:
    """`backward(weights, saved, shared, dy) -> (grads, dx)`, all flat lists. `shared`: alive in both parts."""
    args = [*weights, *saved, *shared, *dy]
    sizes = [len(weights), len(saved), len(shared), len(dy)]
    grads = 0

    def flat(*args: Array) -> list[Array]:
        nonlocal grads
        parts, rest = [], list(args)
        for size in sizes:
            parts.append(rest[:size])
            rest = rest[size:]
        found, dx = backward(*parts)
        grads = len(found)
        return [*found, *dx]

    closed = jax.make_jaxpr(flat)(*args)
    closed = jax.make_jaxpr(lambda *args: _inlined(closed.jaxpr, closed.consts, args))(*args)
    jaxpr = closed.jaxpr
    w, s, h, _ = sizes
    alive = set(jaxpr.invars[:w]) | set(jaxpr.invars[w + s : w + s + h]) | set(jaxpr.constvars)
    return _Cut(jaxpr, closed.consts, grads, set(jaxpr.invars[:w]), alive, set(jaxpr.invars[w + s + h :])).split()


@dataclass(frozen=True)
class _Cut:
    """`grads`: how many of the results are the weights'. `alive`: inputs that need not be kept. `dy`: those that end
    with the first part."""

    jaxpr: Any
    consts: Sequence[Any]
    grads: int
    weights: set[Var]
    alive: set[Var]
    dy: set[Var]

    def split(self) -> Split:
        jaxpr = self.jaxpr
        grads, dx = jaxpr.outvars[: self.grads], jaxpr.outvars[self.grads :]
        later = self._later(dx, grads)
        from_alive = self._from_alive()
        made_first = {v for i, eqn in enumerate(jaxpr.eqns) if i not in later for v in eqn.outvars} | self.dy
        read = [v for i in sorted(later) for v in _vars(jaxpr.eqns[i].invars)] + list(_vars(grads))
        handed = [v for v in dict.fromkeys(read) if v in made_first and v not in from_alive]
        # What follows from what is alive is made again: casts and transposes of weights.
        kept = [v for v in jaxpr.invars if v not in self.dy]
        second = self._slice(grads, stop={*handed, *kept})
        first = [i for i in range(len(jaxpr.eqns)) if i not in later]
        run_first = self._function(first, list(jaxpr.invars), [*dx, *handed])
        run_later = self._function(second, [*kept, *handed], list(grads))
        used = {v for i in second for v in _vars(jaxpr.eqns[i].invars)} | set(_vars(grads))
        return Split(
            first=lambda args: (lambda out: (out[: len(dx)], out[len(dx) :]))(run_first(args)),
            later=lambda args, handed: run_later([*args, *handed]),
            handed=[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in handed],
            weights_later=bool(used & self.weights),
        )

    def _later(self, dx: Sequence[Any], grads: Sequence[Any]) -> set[int]:
        """Equations of the later part: products that only the weights need, what feeds only them, what follows."""
        eqns = self.jaxpr.eqns
        now = set(self._slice(dx))
        products = {i for i in self._slice(grads) if i not in now and eqns[i].primitive.name == "dot_general"}
        feeding = {v for i in products for v in _vars(eqns[i].invars)}
        later = products | {i for i in self._slice(list(feeding)) if i not in now}
        made = {v for i in later for v in eqns[i].outvars}
        for i, eqn in enumerate(eqns):
            if i not in now and i not in later and any(v in made for v in _vars(eqn.invars)):
                later.add(i)
                made |= set(eqn.outvars)
        return later

    def _from_alive(self) -> set[Var]:
        """Everything that follows from the weights and what is shared, alone."""
        known = set(self.alive)
        for eqn in self.jaxpr.eqns:
            if all(v in known for v in _vars(eqn.invars)) and eqn.primitive.name != "dot_general":
                known |= set(eqn.outvars)
        return known

    def _slice(self, wanted: Iterable[Any], stop: set[Var] | None = None) -> list[int]:
        """The equations that these results need, in order; `stop`: what is there already."""
        stop = stop or set()
        needed, found = {v for v in _vars(wanted) if v not in stop}, []
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[i]
            if any(v in needed for v in eqn.outvars):
                found.append(i)
                needed |= {v for v in _vars(eqn.invars) if v not in stop}
        return found[::-1]

    def _function(self, eqns: Sequence[int], invars: list[Var], outvars: list[Any]) -> Callable[..., list[Array]]:
        part = self.jaxpr.replace(invars=invars, outvars=outvars, eqns=[self.jaxpr.eqns[i] for i in eqns])
        return lambda args: jax.core.eval_jaxpr(part, self.consts, *args)


@dataclass
class SplitGradient:
    """`LayerGradient.backward` in two. `first` must be traced before `later`: the cut is made there."""

    gradient: LayerGradient
    _split: Split | None = field(default=None, init=False)
    _grads: Any = field(default=None, init=False)

    def first(
        self, weights: Params, saved: list[Array], ctx: Context, dy: Any, scales: Totals
    ) -> tuple[Any, list[Array]]:
        """-> gradient of the input, and what `later` needs of what was made."""
        parts = (weights, saved, (ctx, scales), dy)
        (flat_weights, _), (_, _), (shared, shared_def), (flat_dy, dy_def) = map(jax.tree.flatten, parts)
        weights_def = jax.tree.structure(weights)

        def backward(w: Any, s: Any, h: Any, d: Any) -> tuple[list[Array], list[Array]]:
            ctx, scales = jax.tree.unflatten(shared_def, h)
            grads, dx = self.gradient.backward(
                jax.tree.unflatten(weights_def, w), s, ctx, jax.tree.unflatten(dy_def, d), scales
            )
            return jax.tree.leaves(grads), jax.tree.leaves(dx)

        self._split, self._grads = split(backward, flat_weights, saved, shared, flat_dy), weights_def
        dx, handed = self._split.first([*flat_weights, *saved, *shared, *flat_dy])
        return jax.tree.unflatten(dy_def, dx), handed

    @property
    def reads_weights(self) -> bool:
        assert self._split is not None
        return self._split.weights_later

    def later(self, weights: Params, saved: list[Array], ctx: Context, scales: Totals, handed: list[Array]) -> Params:
        """-> gradients of the weights."""
        assert self._split is not None
        args = [*jax.tree.leaves(weights), *saved, *jax.tree.leaves((ctx, scales))]
        return jax.tree.unflatten(self._grads, self._split.later(args, handed))


def _vars(atoms: Iterable[Any]) -> Iterable[Var]:
    return (a for a in atoms if not isinstance(a, core.Literal))


def _inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with every plain call in it opened, so that a trace of this is flat."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value(a) for a in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in _CALLS else None
        if eqn.primitive.name == "pvary":
            # What is constant inside a call may vary already where the call is opened.
            results = [collectives.vary(x, eqn.params["axes"]) for x in operands]
        elif inner is not None:
            closed = inner if hasattr(inner, "consts") and hasattr(inner, "jaxpr") else None
            results = _inlined(inner.jaxpr if closed else inner, closed.consts if closed else [], operands)
        else:
            variables = list(dict.fromkeys(_vars(eqn.invars)))
            one = jaxpr.replace(constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn])
            results = jax.core.eval_jaxpr(one, [], *(values[v] for v in variables))
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [value(a) for a in jaxpr.outvars]
