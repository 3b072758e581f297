"""The weights of one stack, layer by layer: fetched one layer ahead of their use, gradients returned one layer behind.

Carrying the next layer's weights and the previous layer's gradient through the loop lets XLA put the layer's matmuls
between the start and the end of each ZeRO collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar import collectives
from jaxpar.parallel import zero
from jaxpar.placement import Placement
from jaxpar.structure import Params


@dataclass(frozen=True)
class StackWeights:
    """`params`: what this stage stores of one stack, `[place, *dims]`; `dtype`: what the layers compute in; `adds`:
    whether a layer's gradient is made of several.
    """

    params: Params
    placements: Mapping[str, Placement]
    dtype: Any
    adds: bool

    @property
    def ahead(self) -> bool:
        """Whether fetching communicates, so that it is worth doing a layer ahead."""
        return any(p.gathers for p in self.placements.values())

    @property
    def behind(self) -> bool:
        """Whether returning a gradient communicates, so that it is worth doing a layer behind."""
        return any(p.scatters_each_microbatch for p in self.placements.values())

    def fetch(self, place: Array | int) -> Params:
        """The weights of one layer, whole, unpadded, in the compute dtype."""
        shards = {path: lax.dynamic_index_in_dim(x, place, 0, keepdims=False) for path, x in self.params.items()}
        return zero.fetch(shards, self.placements, self.dtype)

    def stand_in(self) -> Params:
        """Of the weights' shapes, for what does not read them."""
        return {
            path: collectives.vary(jnp.zeros(p.local(p.info.dims), p.computes_in(self.dtype) or p.info.dtype))
            for path, p in self.placements.items()
        }

    def hold(self) -> Params:
        """What is carried between loops, at the start: the first layer's weights, if they are fetched ahead."""
        return self.fetch(0) if self.ahead else {}

    def pending(self) -> Params:
        """A gradient of zeros to start with, if gradients are returned behind."""
        if not self.behind:
            return {}
        return {
            path: collectives.vary(jnp.zeros(p.local(p.info.dims), p.computes_in(self.dtype) or p.info.dtype))
            for path, p in self.placements.items()
        }

    def accumulate(self, total: Params, grads: Params, place: Array | int) -> Params:
        """Puts one layer's scattered gradients in place: added, or alone if there are no others."""

        def put(path: str, acc: Array) -> Array:
            new = grads[path]
            if self.adds:
                new = lax.dynamic_index_in_dim(acc, place, 0, keepdims=False) + new
            acc = lax.dynamic_update_index_in_dim(acc, new, place, 0)
            return collectives.constrain(acc, collectives.behind(1, self.placements[path].tensor_spec))

        return {path: put(path, acc) for path, acc in total.items()}


def zeros(placements: Mapping[str, Placement]) -> Params:
    """Accumulators for every parameter, float32, as `zero.scatter` returns them, a stack's places in front."""

    def make(p: Placement) -> Array:
        acc = collectives.vary(jnp.zeros(zero.accumulator_shape(p), jnp.float32))
        return collectives.constrain(acc, collectives.behind(len(p.local_lead), p.tensor_spec))

    return {path: make(p) for path, p in placements.items()}


def barrier(dx: Any, grads: Params) -> tuple[Any, Params]:
    """Keeps XLA from sinking the reduction behind the layer's own matmuls."""
    return jax.lax.optimization_barrier((dx, grads))
