"""The two ends of the model: embedding and head, played by all stages of a pipeline together."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar import collectives
from jaxpar.errors import ModelError
from jaxpar.executor.layer import Totals, as_totals
from jaxpar.model import Context
from jaxpar.parallel import vocabulary, zero
from jaxpar.placement import Placement
from jaxpar.structure import Params, Structure

Batch = dict[str, Array]


@dataclass(frozen=True)
class Ends:
    """`outer`: the parameters outside the stacks, whole but for the vocabulary that stages share: ZeRO 3 gathers them
    once a step, since both ends of every microbatch need them.
    """

    structure: Structure
    placements: Mapping[str, Placement]
    outer: Params
    dtype: Any

    def embed(self, batch: Batch, ctx: Context) -> Any:
        """The first layer's input, the same on every stage."""
        return self._embed(self.outer, batch, ctx)

    def head(self, x: Any, batch: Batch, ctx: Context) -> Totals:
        return self._head(self.outer, x, batch, ctx)

    def head_and_gradients(self, x: Any, batch: Batch, ctx: Context, scales: Totals) -> tuple[Totals, Params, Any]:
        """-> totals, gradients of the parameters and of `x`; each the same on every stage, but for shared slices."""
        totals, vjp = jax.vjp(lambda outer, x: self._head(outer, x, batch, ctx), self.outer, x)
        return totals, *vjp(_pick(scales, totals))

    def embed_gradients(self, batch: Batch, ctx: Context, dx: Any) -> Params:
        _, vjp = jax.vjp(lambda outer: self._embed(outer, batch, ctx), self.outer)
        return vjp(dx)[0]

    def accumulate(self, total: Params, grads: Params) -> Params:
        scattered = zero.scatter(grads, {path: self.placements[path] for path in grads})
        return {path: total[path] + g for path, g in scattered.items()}

    def check_uses(self, x: Any, batch: Batch, ctx: Context) -> None:
        """Raises `PlanError` if the model takes a slice of the vocabulary for the whole."""
        if self._slices:
            shared = {path for path in self.outer if self.placements[path].shared_over_pipe}
            vocabulary.check_uses(lambda outer: self._embed(outer, batch, ctx), self.outer, shared)
            vocabulary.check_uses(lambda outer: self._head(outer, x, batch, ctx), self.outer, shared)

    @cached_property
    def _slices(self) -> dict[int, int]:
        """Rows of the whole, by rows of a slice."""
        shared = [path for path in self.outer if self.placements[path].shared_over_pipe]
        return {self.outer[path].shape[0]: self.placements[path].info.dims[0] for path in shared}

    def _embed(self, outer: Params, batch: Batch, ctx: Context) -> Any:
        with vocabulary.shared(self._slices):
            x = self.structure.outer(outer).embed(batch, ctx.at_depth(-1))
        x = jax.tree.map(lambda a: a.astype(self.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, x)
        return collectives.vary(x)

    def _head(self, outer: Params, x: Any, batch: Batch, ctx: Context) -> Totals:
        with vocabulary.shared(self._slices):
            totals = self.structure.outer(outer).head(x, batch, ctx.at_depth(self.structure.layers))
        return as_totals(totals)


def add_totals(old: Totals, new: Totals) -> Totals:
    return old | {name: old[name] + t if name in old else t for name, t in new.items()}


def _pick(scales: Totals, totals: Totals) -> Totals:
    unknown = [name for name in totals if name not in scales]
    if unknown:
        raise ModelError(f"totals {unknown} have no term; terms(batch) declares {list(scales)}")
    return {name: scales[name] for name in totals}
