"""The loop over the layers of a stack, forward and backward."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.executor.layer import LayerGradient, Totals
from jaxpar.executor.weights import StackWeights, barrier
from jaxpar.model import Context
from jaxpar.parallel import zero
from jaxpar.structure import Params


@dataclass(frozen=True)
class StackLoop:
    """One stack under one plan. `first_depth`: the depth of its first layer in the whole model."""

    weights: StackWeights
    gradient: LayerGradient
    first_depth: int

    def forward(self, x: Any, held: Params, ctx: Context) -> tuple[Any, Params, Totals, list[Array]]:
        """-> output, the last layer's weights (if fetched ahead), totals, what each layer saved."""

        def body(carry: tuple[Any, Params], i: Array) -> Any:
            x, held = carry
            weights, held = self._next(held, i, jnp.minimum(i + 1, self._last))
            y, totals, saved = self.gradient.forward(weights, x, self._context(ctx, i))
            return (y, held), (totals, saved)

        (y, held), (totals, saved) = lax.scan(body, (x, held), jnp.arange(self.weights.layers))
        return y, held, jax.tree.map(jnp.sum, totals), saved

    def evaluate(self, x: Any, held: Params, ctx: Context) -> tuple[Any, Params, Totals]:
        """`forward` that saves nothing."""

        def body(carry: tuple[Any, Params], i: Array) -> Any:
            x, held = carry
            weights, held = self._next(held, i, (i + 1) % self.weights.layers)
            y, totals = self.gradient.layer(weights, x, self._context(ctx, i))
            return (y, held), totals

        (y, held), totals = lax.scan(body, (x, held), jnp.arange(self.weights.layers))
        return y, held, jax.tree.map(jnp.sum, totals)

    def backward(
        self, dy: Any, held: Params, pending: Params, total: Params, saved: list[Array], ctx: Context, scales: Totals
    ) -> tuple[Any, Params, Params, Params]:
        """-> gradient of the input, the first layer's weights, the first layer's gradient, the accumulators.

        `held` and `pending` come from the loop before and go to the next one: the last weights fetched are the first
        that the next microbatch needs, and the last gradient is returned while its first layer runs.
        """

        def body(carry: Any, inputs: Any) -> Any:
            dy, held, pending, total = carry
            i, saved = inputs
            weights, held = self._next(held, i, jnp.maximum(i - 1, 0))
            if self.weights.behind:
                scattered = zero.scatter(pending, self.weights.placements)
            grads, dx = self.gradient.backward(weights, saved, self._context(ctx, i), dy, scales)
            if self.weights.behind:
                dx, scattered = barrier(dx, scattered)
                total = self.weights.accumulate(total, scattered, (i + 1) % self.weights.layers)
                return (dx, held, grads, total), None
            grads = zero.scatter(grads, self.weights.placements)
            return (dx, held, pending, self.weights.accumulate(total, grads, i)), None

        inputs = (jnp.arange(self.weights.layers), saved)
        (dx, held, pending, total), _ = lax.scan(body, (dy, held, pending, total), inputs, reverse=True)
        return dx, held, pending, total

    def flush(self, pending: Params, total: Params) -> Params:
        """Returns the very last gradient, the first layer's of the last microbatch."""
        if not self.weights.behind:
            return total
        return self.weights.accumulate(total, zero.scatter(pending, self.weights.placements), 0)

    @property
    def _last(self) -> int:
        return self.weights.layers - 1

    def _next(self, held: Params, now: Array, then: Array) -> tuple[Params, Params]:
        """This layer's weights, and what is to be carried: the weights of the layer after it, if fetched ahead."""
        if self.weights.ahead:
            return held, self.weights.fetch(then)
        return self.weights.fetch(now), held

    def _context(self, ctx: Context, i: Array) -> Context:
        return ctx.at_depth(self.first_depth + i)
