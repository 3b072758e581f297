"""The loop over the layers of a chunk, forward and backward, between ring buffers.

A place counts the layers that a stage holds of one stack: `chunk * longest + layer`. What a layer saves is written in
place into the slot that the schedule's table gives, `[slot, layer, ...]`, so that nothing is stacked and copied.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar import collectives, offload
from jaxpar.executor.buffers import masked, read, select, write
from jaxpar.executor.layer import LayerGradient, Totals
from jaxpar.executor.split import SplitGradient
from jaxpar.executor.weights import StackWeights, barrier
from jaxpar.model import Context
from jaxpar.parallel import zero
from jaxpar.structure import Params

Saved = list[Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class At:
    """Where one task is played, int32 scalars that may differ between stages.

    Attributes:
      first: the place of the chunk's first layer.
      then: the place whose weights are needed next, in whatever task comes next.
      saved: slot of the ring buffer of saved activations.
      between: slot of the ring buffer of what a split backward hands over.
      valid: bool; None: on every stage. Where it is False, nothing that is computed counts.
    """

    first: Array
    then: Array
    saved: Array
    between: Array
    valid: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pending:
    """A gradient whose reduction waits for the next layer's matmuls, and the place it belongs to."""

    grads: Params
    place: Array


@dataclass(frozen=True)
class Chunks:
    """One stack on this stage under one plan. `depths`: int32[place], in the whole model; negative: no layer."""

    weights: StackWeights
    gradient: LayerGradient
    depths: Array
    padded: bool
    longest: int

    @cached_property
    def split(self) -> SplitGradient:
        return SplitGradient(self.gradient)

    def forward(self, x: Any, held: Params, saved: Saved, ctx: Context, at: At) -> tuple[Any, Params, Saved, Totals]:
        """-> output, the weights fetched ahead, the buffers, totals."""

        def body(carry: Any, i: Array) -> Any:
            x, held, saved = carry
            place = at.first + i
            weights, held = self._next(held, place, jnp.where(i == self.longest - 1, at.then, place + 1))
            y, totals, leaves = self.gradient.forward(weights, x, self._context(ctx, place))
            y, totals = self._where(place, None, (y, totals), (x, jax.tree.map(jnp.zeros_like, totals)))
            saved = [write(buffer, leaf, at.saved, i) for buffer, leaf in zip(saved, leaves, strict=True)]
            return (y, held, saved), totals

        (y, held, saved), totals = lax.scan(body, (x, held, saved), jnp.arange(self.longest))
        return y, held, saved, masked(at.valid, jax.tree.map(jnp.sum, totals))

    def evaluate(self, x: Any, held: Params, ctx: Context, at: At) -> tuple[Any, Params, Totals]:
        """`forward` that saves nothing."""

        def body(carry: Any, i: Array) -> Any:
            x, held = carry
            place = at.first + i
            weights, held = self._next(held, place, jnp.where(i == self.longest - 1, at.then, place + 1))
            y, totals = self.gradient.layer(weights, x, self._context(ctx, place))
            y, totals = self._where(place, None, (y, totals), (x, jax.tree.map(jnp.zeros_like, totals)))
            return (y, held), totals

        (y, held), totals = lax.scan(body, (x, held), jnp.arange(self.longest))
        return y, held, masked(at.valid, jax.tree.map(jnp.sum, totals))

    def backward(
        self, dy: Any, held: Params, pending: Pending, total: Params, saved: Saved, ctx: Context, scales: Totals, at: At
    ) -> tuple[Any, Params, Pending, Params]:
        """-> gradient of the input, the weights fetched ahead, the gradient not yet reduced, the accumulators."""

        def body(carry: Any, i: Array) -> Any:
            dy, held, pending, total = carry
            place = at.first + i
            weights, held = self._next(held, place, jnp.where(i == 0, at.then, place - 1))
            if self.weights.behind:
                scattered = zero.scatter(pending.grads, self.weights.placements)
            leaves = [read(buffer, at.saved, i) for buffer in saved]
            grads, dx = self.gradient.backward(weights, leaves, self._context(ctx, place), dy, scales)
            grads, dx = (
                self._where(place, at.valid, grads, jax.tree.map(jnp.zeros_like, grads)),
                self._where(place, None, dx, dy),
            )
            if self.weights.behind:
                dx, scattered = barrier(dx, scattered)
                total = self.weights.accumulate(total, scattered, pending.place)
                return (dx, held, Pending(grads, collectives.vary(place)), total), None
            grads = zero.scatter(grads, self.weights.placements)
            return (dx, held, pending, self.weights.accumulate(total, grads, place)), None

        (dx, held, pending, total), _ = lax.scan(
            body, (dy, held, pending, total), jnp.arange(self.longest), reverse=True
        )
        return dx, held, pending, total

    def input_gradient(
        self, dy: Any, held: Params, between: Saved, saved: Saved, ctx: Context, scales: Totals, at: At
    ) -> tuple[Any, Params, Saved]:
        """-> gradient of the input, the weights fetched ahead, the buffers of what the weights' gradients need."""

        def body(carry: Any, i: Array) -> Any:
            dy, held, between = carry
            place = at.first + i
            weights, held = self._next(held, place, jnp.where(i == 0, at.then, place - 1))
            leaves = [read(buffer, at.saved, i) for buffer in saved]
            dx, handed = self.split.first(weights, leaves, self._context(ctx, place), dy, scales)
            between = [write(buffer, x, at.between, i) for buffer, x in zip(between, handed, strict=True)]
            return (self._where(place, None, dx, dy), held, between), None

        (dx, held, between), _ = lax.scan(body, (dy, held, between), jnp.arange(self.longest), reverse=True)
        return dx, held, between

    def weight_gradient(
        self, pending: Pending, total: Params, between: Saved, saved: Saved, ctx: Context, scales: Totals, at: At
    ) -> tuple[Pending, Params]:
        """What `input_gradient` left: -> the gradient not yet reduced, the accumulators."""

        def body(carry: Any, i: Array) -> Any:
            pending, total = carry
            place = at.first + i
            weights = self.weights.fetch(place) if self.split.reads_weights else self.weights.stand_in()
            leaves, handed = ([read(b, slot, i) for b in bs] for bs, slot in ((saved, at.saved), (between, at.between)))
            grads = self.split.later(weights, leaves, self._context(ctx, place), scales, handed)
            grads = self._where(place, at.valid, grads, jax.tree.map(jnp.zeros_like, grads))
            return self._return(pending, total, grads, place), None

        return lax.scan(body, (pending, total), jnp.arange(self.longest), reverse=True)[0]

    def _return(self, pending: Pending, total: Params, grads: Params, place: Array) -> tuple[Pending, Params]:
        if not self.weights.behind:
            return pending, self.weights.accumulate(total, zero.scatter(grads, self.weights.placements), place)
        scattered = zero.scatter(pending.grads, self.weights.placements)
        grads, scattered = barrier(grads, scattered)
        return Pending(grads, collectives.vary(place)), self.weights.accumulate(total, scattered, pending.place)

    def pending(self) -> Pending:
        return Pending(self.weights.pending(), collectives.vary(jnp.zeros((), jnp.int32)))

    def flush(self, pending: Pending, total: Params) -> Params:
        """Returns the very last gradient of the step."""
        if not self.weights.behind:
            return total
        grads = zero.scatter(pending.grads, self.weights.placements)
        return self.weights.accumulate(total, grads, pending.place)

    def buffers(self, slots: int, x: Any, ctx: Context) -> Saved:
        """Empty ring buffers for what `forward` saves of inputs like `x`."""

        shapes = jax.eval_shape(lambda x, ctx: self.gradient.forward(self.weights.fetch(0), x, ctx)[2], x, ctx)
        return self._buffers(slots, shapes, [self.gradient.moves(s) for s in shapes])

    def between_buffers(self, slots: int, x: Any, ctx: Context, scales: Totals) -> Saved:
        """Empty ring buffers for what `input_gradient` hands to `weight_gradient`; made after `buffers`."""

        def handed(x: Any, ctx: Context, scales: Totals) -> Saved:
            weights = self.weights.fetch(0)
            return self.split.first(weights, self.gradient.forward(weights, x, ctx)[2], ctx, x, scales)[1]

        shapes = jax.eval_shape(handed, x, ctx, scales)
        return self._buffers(slots, shapes, [False] * len(shapes))

    def _buffers(self, slots: int, shapes: list[jax.ShapeDtypeStruct], on_host: list[bool]) -> Saved:
        empty = [collectives.vary(jnp.zeros((slots, self.longest, *s.shape), s.dtype)) for s in shapes]
        return [offload.to_host(x) if away else x for x, away in zip(empty, on_host, strict=True)]

    def _next(self, held: Params, now: Array, then: Array) -> tuple[Params, Params]:
        """This layer's weights, and what is to be carried: the weights of the layer after it, if fetched ahead."""
        if self.weights.ahead:
            return held, self.weights.fetch(then)
        return self.weights.fetch(now), held

    def _context(self, ctx: Context, place: Array) -> Context:
        return ctx.at_depth(self.depths[place])

    def _where[T](self, place: Array, valid: Array | None, played: T, otherwise: T) -> T:
        """`otherwise` where the place holds no layer, or the task is not valid."""
        if self.padded:
            there = self.depths[place] >= 0
            valid = there if valid is None else there & valid
        return select(valid, played, otherwise)
