"""The manual region: one `shard_map` over `data`, `pipe`, `seq` and `expert`, automatic over `tensor`."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import collectives
from jaxpar.batch import BatchAxes, batch_spec, local_positions
from jaxpar.errors import ModelError, PlanError
from jaxpar.executor.layer import LayerGradient, Totals, apply_layer
from jaxpar.executor.microbatch import Batch, Executor, add_totals, start
from jaxpar.executor.stacks import StackLoop
from jaxpar.executor.weights import StackWeights, zeros
from jaxpar.mesh import MANUAL_AXES, ROW_AXES, ZERO_AXES, count
from jaxpar.model import Context, Term
from jaxpar.parallel import zero
from jaxpar.parallel.attention import attend_on_tensor_shards
from jaxpar.placement import Placement
from jaxpar.plan import Plan
from jaxpar.structure import Params, Structure


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """By term, float32 scalars, the same on every device: the summed totals, the summed weights, the coefficients."""

    totals: Totals
    weights: Totals
    coefs: Totals

    def means(self) -> Totals:
        """Each term's total over its weight; 0 where nothing counts."""
        return {
            name: jnp.where(w > 0, self.totals[name] / jnp.where(w > 0, w, 1.0), 0.0)
            for name, w in self.weights.items()
        }

    def objective(self) -> Array:
        return sum((self.coefs[name] * mean for name, mean in self.means().items()), start=jnp.zeros((), jnp.float32))


@dataclass(frozen=True)
class Region:
    """The step's forward and backward, and evaluation's forward, as functions of global arrays."""

    structure: Structure
    placements: dict[str, Placement]
    plan: Plan
    batch_axes: BatchAxes
    mesh: Mesh

    def gradients(self, params: Params, batch: Batch, rows: Array, key: Array) -> tuple[Params, Sums]:
        """-> gradients of the objective (as `Placement.update_spec`), and the sums over the whole step.

        `rows`: int32 global row ids; `key`: this step's random key.
        """
        specs = {path: p.update_spec(manual_only=True) for path, p in self.placements.items()}
        return self._shard_map(self._gradients, batch, (specs, P()))(params, batch, rows, key)

    def totals(self, params: Params, batch: Batch, rows: Array, key: Array, valid: Array, one_by_one: bool) -> Sums:
        """The sums over one batch, forward alone.

        `valid`: float32[rows], 0.0 for rows that only fill up a ragged batch. A model's totals are sums over rows, so
        such rows can be left out only if each device runs its rows `one_by_one`.
        """
        f = partial(self._totals, one_by_one=one_by_one)
        return self._shard_map(f, batch, P(), P(ROW_AXES))(params, batch, rows, key, valid)

    def _shard_map(self, f: Any, batch: Batch, out_specs: Any, *more: P) -> Any:
        in_specs = (
            {path: p.param_spec(manual_only=True) for path, p in self.placements.items()},
            {name: batch_spec(self.batch_axes, name) for name in batch},
            P(ROW_AXES),
            P(),
            *more,
        )
        axes = set(MANUAL_AXES) & set(self.mesh.axis_names)
        in_specs, out_specs = jax.tree.map(
            lambda spec: collectives.live_spec(spec, self.mesh),
            (in_specs, out_specs),
            is_leaf=lambda x: isinstance(x, P),
        )
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)

    def _gradients(self, params: Params, batch: Batch, rows: Array, key: Array) -> tuple[Params, Sums]:
        params, batch, rows, key = collectives.vary((params, batch, rows, key))
        executor = self._executor(params)
        terms = self._terms(executor, batch)
        weights = {name: collectives.psum(t.weight, MANUAL_AXES) for name, t in terms.items()}
        scales = collectives.vary({name: _scale(terms[name], w) for name, w in weights.items()})
        batches, split_rows = _split((batch, rows), self.plan.microbatches)
        contexts = self._context(batches, split_rows, key, train=True)
        carry = start(list(terms), zeros(self.placements, count(self.mesh, ZERO_AXES)), executor.loops)
        carry = executor.step(batches, contexts, scales, carry)
        self._check_saved(executor)
        totals = {name: collectives.psum(t, MANUAL_AXES) for name, t in carry.totals.items()}
        return zero.finish(carry.grads, self.placements), Sums(totals, weights, _coefs(terms))

    def _totals(self, params: Params, batch: Batch, rows: Array, key: Array, valid: Array, *, one_by_one: bool) -> Sums:
        params, batch, rows, key, valid = collectives.vary((params, batch, rows, key, valid))
        executor = self._executor(params)

        def part(sums: tuple[Totals, Totals], inputs: tuple[Batch, Context, Array]) -> Any:
            batch, ctx, valid = inputs
            weights = {name: t.weight for name, t in self._terms(executor, batch).items()}
            return _add_valid(sums, (executor.evaluate(batch, ctx), weights), valid[0]), None

        batches, split_rows, split_valid = _split((batch, rows, valid), valid.shape[0] if one_by_one else 1)
        contexts = self._context(batches, split_rows, key, train=False)
        terms = self._terms(executor, batch)
        none = collectives.vary({name: jnp.zeros((), jnp.float32) for name in terms})
        sums, _ = jax.lax.scan(part, (none, none), (batches, contexts, split_valid))
        totals, weights = jax.tree.map(partial(collectives.psum, axes=MANUAL_AXES), sums)
        return Sums(totals, weights, _coefs(terms))

    def _terms(self, executor: Executor, batch: Batch) -> dict[str, Term]:
        terms = self.structure.outer(executor.outer).terms(batch)
        wrong = [name for name, t in terms.items() if not isinstance(t, Term) or jnp.shape(t.weight) != ()]
        if wrong or not terms:
            raise ModelError(
                f"terms(batch) needs scalars as jaxpar.Term(weight, coef), by name; wrong: {wrong or terms}"
            )
        return {name: Term(collectives.vary(jnp.asarray(t.weight, jnp.float32)), t.coef) for name, t in terms.items()}

    def _check_saved(self, executor: Executor) -> None:
        met = set().union(*(loop.gradient.met for loop in executor.loops.values()))
        if unknown := [name for name in self.plan.saved_names if name not in met]:
            raise PlanError(
                f"remat={self.plan.remat!r}: no layer saves {', '.join(map(repr, unknown))}; name it in the layer with "
                f"jaxpar.save(x, {unknown[0]!r}), or leave it out"
            )

    @property
    def _outer(self) -> dict[str, Placement]:
        return {path: p for path, p in self.placements.items() if p.info.stack is None}

    def _executor(self, params: Params) -> Executor:
        # In float32: a bfloat16 head would round the gradient of its weights before it is summed.
        outer = zero.fetch({path: params[path] for path in self._outer}, self._outer)
        outer = jax.tree.map(_at_least_float32, outer)
        loops, depth = {}, 0
        for stack in self.structure.stacks:
            placements = {path: self.placements[path] for path in self.structure.stack_params(stack)}
            # [virtual stage, stage, layer, ...]: without a pipeline the first two have size 1.
            local = {path: params[path].reshape(params[path].shape[2:]) for path in placements}
            weights = StackWeights(
                local, placements, self.plan.compute_dtype, stack.length, adds=self.plan.microbatches > 1
            )
            layer = partial(apply_layer, self.structure, stack)
            offloads = "activations" in self.plan.offload
            gradient = LayerGradient(layer, self.plan.remat, self.plan.saved_names, offloads)
            loops[stack.name] = StackLoop(weights, gradient, depth)
            depth += stack.length
        return Executor(self.structure, self.placements, outer, loops, self.plan.compute_dtype)

    def _context(self, batches: Batch, rows: Array, key: Array, train: bool) -> Context:
        """Contexts with the microbatches in front of every array."""
        count, length = rows.shape[0], local_positions(self.batch_axes, batches)
        index = None
        if length is not None:
            index = collectives.axis_index("seq") * length + collectives.vary(jnp.arange(length, dtype=jnp.int32))
        positions = batches.get("positions")
        if positions is None and index is not None:
            positions = jnp.broadcast_to(index, (*rows.shape, length))

        def repeat(x: Array) -> Array:
            return jnp.broadcast_to(x, (count, *x.shape))

        return Context(
            rows=rows,
            index=None if index is None else repeat(index),
            positions=positions,
            segments=batches.get("segments"),
            key=repeat(key),
            depth=repeat(collectives.vary(jnp.zeros((), jnp.int32))),
            train=train,
            attention=_attend,
            rules=self.plan.rules,
            sites=itertools.count(),
        )


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _attend(q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool) -> Array:
    return attend_on_tensor_shards(q, k, v, segments_q=segments, segments_k=segments, causal=causal)


def _coefs(terms: dict[str, Term]) -> Totals:
    return {name: jnp.float32(t.coef) for name, t in terms.items()}


def _split[T](tree: T, parts: int) -> T:
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), tree)


def _scale(term: Term, weight: Array) -> Array:
    """d(objective) / d(total); 0 if nothing in the whole step counts."""
    return jnp.where(weight > 0, term.coef / jnp.where(weight > 0, weight, 1.0), 0.0)


def _add_valid(sums: tuple[Totals, Totals], new: tuple[Totals, Totals], valid: Array) -> Any:
    # `where`, not a product: a row that does not count may hold anything, infinities too.
    masked = jax.tree.map(lambda x: jnp.where(valid > 0, x, 0.0), new)
    return tuple(add_totals(s, n) for s, n in zip(sums, masked, strict=True))
