"""One layer forward and backward as pure functions, with what lies between them made explicit.

The function that `jax.vjp` returns is a pytree. Its leaves are what the layer saved; those that are the weights, or
arrays that every layer shares, are left out of what is stored and put back, alive, when the backward runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar import collectives, offload
from jaxpar.errors import ModelError
from jaxpar.model import Context
from jaxpar.plan import Remat
from jaxpar.structure import Params, StackInfo, Structure

Totals = dict[str, Array]


def apply_layer(structure: Structure, stack: StackInfo, weights: Params, x: Any, ctx: Context) -> tuple[Any, Totals]:
    """Runs one layer. Raises `ModelError` when it changes the type of `x` or creates state."""
    module = structure.layer(stack, weights)
    before = nnx.graphdef(module)
    out = module(x, ctx)
    y, totals = out if isinstance(out, tuple) else (out, {})
    if nnx.graphdef(module) != before:
        raise ModelError(
            f"a layer of {stack.name!r} creates state in its call, which would be lost; make it in __init__"
        )
    y = jax.tree.map(lambda new, old: new.astype(old.dtype), y, x)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"a layer of {stack.name!r} must keep the shape of x: took {shapes[0]}, gave {shapes[1]}")
    return y, as_totals(totals)


def as_totals(totals: dict[str, Array]) -> Totals:
    """Float32 scalars that vary over every manual axis. Raises `ModelError` for anything but scalars."""
    wrong = {name: jnp.shape(t) for name, t in totals.items() if jnp.shape(t) != ()}
    if wrong:
        raise ModelError(f"totals are sums over rows and positions, scalars; found shapes {wrong}")
    return collectives.vary({name: jnp.asarray(t, jnp.float32) for name, t in totals.items()})


@dataclass
class LayerGradient:
    """The forward and backward of one stack's layer under one remat policy.

    `forward` must be traced before `backward`: what the saved leaves mean is learned there. `names`: what is saved
    by name; those met are in `met` after tracing. `offloads`: what is stored lies in host memory until `backward`.
    """

    layer: Callable[[Params, Any, Context], tuple[Any, Totals]]
    remat: Remat | str
    names: tuple[str, ...] = ()
    offloads: bool = False
    met: set[str] = field(default_factory=set, init=False)
    _treedef: Any = field(default=None, init=False)
    _known: list[int | None] = field(default_factory=list, init=False)
    _constants: dict[int, Any] = field(default_factory=dict, init=False)
    _names: list[str] = field(default_factory=list, init=False)

    def forward(self, weights: Params, x: Any, ctx: Context) -> tuple[Any, Totals, list[Array]]:
        """-> output, totals, and the arrays to store until `backward`: the input alone for remat `full`."""
        if self.remat == "full":
            y, totals = self.layer(weights, x, ctx)
            self._names = list(totals)
            return y, totals, self._move(jax.tree.leaves(x), offload.to_host)
        y, vjp, totals = self._vjp(weights, x, ctx)
        self._names = list(totals)
        leaves, self._treedef = jax.tree.flatten(vjp)
        live = _live(weights, ctx)
        self._known = [next((i for i, known in enumerate(live) if leaf is known), None) for leaf in leaves]
        # Tables that the trace itself holds: every layer would store them, and return them as varying over devices.
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.core.Tracer)}
        saved = [leaf for i, leaf in enumerate(leaves) if self._known[i] is None and i not in self._constants]
        return y, totals, self._move(saved, offload.to_host)

    def backward(
        self, weights: Params, saved: list[Array], ctx: Context, dy: Any, scales: dict[str, Array]
    ) -> tuple[Params, Any]:
        """-> gradients of the weights and of the input; `scales` are the gradients of the totals."""
        saved = self._move(saved, offload.to_device)
        if self.remat == "full":
            _, vjp, _ = self._vjp(weights, jax.tree.unflatten(jax.tree.structure(dy), saved), ctx)
        else:
            vjp = jax.tree.unflatten(self._treedef, self._leaves(_live(weights, ctx), iter(saved)))
        return vjp((dy, {name: scales[name] for name in self._names}))

    def _leaves(self, live: list[Array], stored: Iterator[Array]) -> list[Any]:
        """All leaves of the saved function, in its order."""
        return [
            self._constants[i] if i in self._constants else next(stored) if known is None else live[known]
            for i, known in enumerate(self._known)
        ]

    def _vjp(self, weights: Params, x: Any, ctx: Context) -> Any:
        def run(weights: Params, x: Any) -> tuple[tuple[Any, Totals], Totals]:
            y, totals = self.layer(weights, x, ctx)
            return (y, totals), totals

        if self.remat == "dots":
            run = jax.checkpoint(run, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        if self.names:
            run = jax.checkpoint(run, policy=self._by_name)
        (y, _), vjp, totals = jax.vjp(run, weights, x, has_aux=True)
        return y, vjp, totals

    def moves(self, x: Any) -> bool:
        """Whether something saved of this shape lies in host memory."""
        return self.offloads and offload.worth_moving(x)

    def _move(self, saved: list[Array], move: Callable[[Array], Array]) -> list[Array]:
        return [move(x) if self.moves(x) else x for x in saved]

    def _by_name(self, primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name != "name" or params["name"] not in self.names:
            return False
        self.met.add(params["name"])
        return True


def _live(weights: Params, ctx: Context) -> list[Array]:
    return [*jax.tree.leaves(weights), *jax.tree.leaves(ctx)]
