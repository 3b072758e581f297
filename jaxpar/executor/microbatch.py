"""One microbatch without a pipeline, forward and backward, and the loop over a step's microbatches."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar import collectives
from jaxpar.errors import ModelError
from jaxpar.executor.layer import Totals, as_totals
from jaxpar.executor.stacks import StackLoop
from jaxpar.model import Context
from jaxpar.parallel import zero
from jaxpar.placement import Placement
from jaxpar.structure import Params, Structure

Batch = dict[str, Array]


@dataclass(frozen=True)
class Carry:
    """What goes from microbatch to microbatch. `held` and `pending`: by stack, see `StackLoop.backward`."""

    totals: Totals
    grads: Params
    held: dict[str, Params]
    pending: dict[str, Params]


jax.tree_util.register_dataclass(Carry)


@dataclass(frozen=True)
class Executor:
    """Runs the model on local arrays inside the manual region.

    `outer`: the parameters outside the stacks, whole: ZeRO 3 gathers them once a step, since the embedding is needed
    at both ends of every microbatch. `loops`: one per stack, in depth order.
    """

    structure: Structure
    placements: dict[str, Placement]
    outer: Params
    loops: dict[str, StackLoop]
    dtype: Any

    def step(self, batches: Batch, contexts: Context, scales: Totals, carry: Carry) -> Carry:
        """Forward and backward of every microbatch; arrays have the microbatches in front."""
        count = jax.tree.leaves(batches)[0].shape[0]
        if count == 1:
            return self._flush(self._microbatch(*_first((batches, contexts)), scales, carry))

        def body(carry: Carry, inputs: tuple[Batch, Context]) -> tuple[Carry, None]:
            return self._microbatch(*inputs, scales, carry), None

        return self._flush(lax.scan(body, carry, (batches, contexts))[0])

    def evaluate(self, batch: Batch, ctx: Context) -> Totals:
        """The totals of one batch, forward alone."""
        x = self._embed(self.outer, batch, ctx)
        totals: Totals = {}
        for loop in self.loops.values():
            x, _, new = loop.evaluate(x, loop.weights.hold(), ctx)
            totals = add_totals(totals, new)
        return add_totals(totals, self._head(self.outer, x, batch, ctx))

    def _microbatch(self, batch: Batch, ctx: Context, scales: Totals, carry: Carry) -> Carry:
        x, embed_vjp = jax.vjp(lambda w: self._embed(w, batch, ctx), self.outer)
        totals, saved, held = carry.totals, {}, dict(carry.held)
        for name, loop in self.loops.items():
            x, held[name], new, saved[name] = loop.forward(x, held[name], ctx)
            totals = add_totals(totals, new)
        new, head_vjp = jax.vjp(lambda w, x: self._head(w, x, batch, ctx), self.outer, x)
        totals = add_totals(totals, new)
        head_grads, dx = head_vjp(_pick(scales, new))

        grads, pending = dict(carry.grads), dict(carry.pending)
        for name, loop in reversed(self.loops.items()):
            stack = {path: grads[path] for path in loop.weights.placements}
            dx, held[name], pending[name], stack = loop.backward(
                dx, held[name], pending[name], stack, saved[name], ctx, scales
            )
            grads |= stack
        (embed_grads,) = embed_vjp(dx)
        outer_grads = zero.scatter(jax.tree.map(jnp.add, head_grads, embed_grads), self._outer_placements)
        grads |= {path: grads[path] + g for path, g in outer_grads.items()}
        return Carry(totals, grads, held, pending)

    def _flush(self, carry: Carry) -> Carry:
        grads = dict(carry.grads)
        for name, loop in self.loops.items():
            stack = {path: grads[path] for path in loop.weights.placements}
            grads |= loop.flush(carry.pending[name], stack)
        return Carry(carry.totals, grads, carry.held, carry.pending)

    @property
    def _outer_placements(self) -> dict[str, Placement]:
        return {path: self.placements[path] for path in self.outer}

    def _embed(self, outer: Params, batch: Batch, ctx: Context) -> Any:
        x = self.structure.outer(outer).embed(batch, ctx.at_depth(-1))
        x = jax.tree.map(lambda a: a.astype(self.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, x)
        return collectives.vary(x)

    def _head(self, outer: Params, x: Any, batch: Batch, ctx: Context) -> Totals:
        totals = self.structure.outer(outer).head(x, batch, ctx.at_depth(self.structure.layers))
        return as_totals(totals)


def start(names: list[str], grads: Params, loops: dict[str, StackLoop]) -> Carry:
    """The carry before the first microbatch."""
    totals = collectives.vary({name: jnp.zeros((), jnp.float32) for name in names})
    held = {name: loop.weights.hold() for name, loop in loops.items()}
    pending = {name: loop.weights.pending() for name, loop in loops.items()}
    return Carry(totals, grads, held, pending)


def add_totals(old: Totals, new: Totals) -> Totals:
    return old | {name: old[name] + t if name in old else t for name, t in new.items()}


def _pick(scales: Totals, totals: Totals) -> Totals:
    unknown = [name for name in totals if name not in scales]
    if unknown:
        raise ModelError(f"totals {unknown} have no term; terms(batch) declares {list(scales)}")
    return {name: scales[name] for name in totals}


def _first[T](tree: T) -> T:
    return jax.tree.map(lambda x: x[0], tree)
