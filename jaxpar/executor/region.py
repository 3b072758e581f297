"""The manual region: one `shard_map` over `data`, `pipe`, `seq` and `expert`, automatic over `tensor`."""

import itertools
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import collectives
from jaxpar.batch import BatchAxes, batch_spec, local_positions, position_dim
from jaxpar.errors import ModelError, PlanError
from jaxpar.executor.chunks import Chunks
from jaxpar.executor.ends import Batch, Ends
from jaxpar.executor.float8 import Layer, in_float8
from jaxpar.executor.layer import LayerGradient, Totals, apply_layer
from jaxpar.executor.player import Player
from jaxpar.executor.weights import StackWeights, zeros
from jaxpar.mesh import MANUAL_AXES, REPLICA_AXES, ROW_AXES
from jaxpar.model import Context, Term
from jaxpar.parallel import zero
from jaxpar.parallel.attention import attend_on_tensor_shards
from jaxpar.parallel.expert import Route
from jaxpar.parallel.halo import Halo
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.parallel.sequence_attention import attend_over_sequence
from jaxpar.pipeline.layers import StageLayers
from jaxpar.pipeline.table import lower
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

    @cached_property
    def _sequence(self) -> SequenceLayout | None:
        """How rows lie over `seq`; None: whole."""
        devices = self.mesh.shape["seq"]
        return SequenceLayout.of(self.plan, devices) if devices > 1 else None

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
        ends = self._ends(params)
        whole, batch = self._whole_rows(batch)
        terms = self._terms(ends, whole)
        weights = {name: self._sum(t.weight) for name, t in terms.items()}
        scales = collectives.vary({name: _scale(terms[name], w) for name, w in weights.items()})
        batches, split_rows = _split((batch, rows), self.plan.microbatches)
        contexts = self._context(batches, split_rows, key, train=True)
        table = lower(self.plan.schedule(self._stages, len(self.structure.stacks)))
        player = Player(table, ends, self._chunks(params), batches, contexts, scales)
        start = zeros(self.placements)
        by_lane = [{path: start[path] for path in self.structure.stack_params(s)} for s in self.structure.stacks]
        totals, grads, outer = player.play(_zero_totals(terms), by_lane, {path: start[path] for path in self._outer})
        self._check_saved(player)
        for stack in grads:
            outer = outer | stack
        totals = {name: collectives.psum(t, MANUAL_AXES) for name, t in totals.items()}
        return zero.finish(outer, self.placements), Sums(totals, weights, _coefs(terms))

    def _totals(self, params: Params, batch: Batch, rows: Array, key: Array, valid: Array, *, one_by_one: bool) -> Sums:
        params, batch, rows, key, valid = collectives.vary((params, batch, rows, key, valid))
        ends = self._ends(params)
        parts = self._evaluation_parts(valid.shape[0], one_by_one)
        whole, batch = self._whole_rows(batch)
        batches, split_rows, split_valid = _split((batch, rows, valid), parts)
        counts = split_valid[:, 0] > 0
        contexts = self._context(batches, split_rows, key, train=False)
        table = lower(self.plan.forward_schedule(self._stages, parts, len(self.structure.stacks)))
        player = Player(table, ends, self._chunks(params), batches, contexts, None, counts)
        terms = self._terms(ends, whole)
        totals, _, _ = player.play(_zero_totals(terms), [], {})
        each = _split(whole, parts)
        weights = jax.lax.map(lambda part: {n: t.weight for n, t in self._terms(ends, part).items()}, each)
        # `where`, not a product: a row that does not count may hold anything, infinities too.
        weights = {name: self._sum(jnp.sum(jnp.where(counts, w, 0.0))) for name, w in weights.items()}
        return Sums({name: collectives.psum(t, MANUAL_AXES) for name, t in totals.items()}, weights, _coefs(terms))

    def _evaluation_parts(self, rows: int, one_by_one: bool) -> int:
        """How many parts a device's rows are evaluated in: enough to fill a pipeline, if they divide."""
        if one_by_one:
            return rows
        return self.plan.microbatches if self._stages > 1 and rows % self.plan.microbatches == 0 else 1

    def _sum(self, x: Array) -> Array:
        """The sum over the step of what all stages of a pipeline, and all parts of a row, have computed alike."""
        if self._sequence is not None:
            x = jnp.where(collectives.axis_index("seq") == 0, x, 0.0)
        return collectives.from_stage(collectives.psum(x, REPLICA_AXES), 0)

    def _terms(self, ends: Ends, batch: Batch) -> dict[str, Term]:
        terms = self.structure.outer(ends.outer).terms(batch)
        wrong = [name for name, t in terms.items() if not isinstance(t, Term) or jnp.shape(t.weight) != ()]
        if wrong or not terms:
            raise ModelError(
                f"terms(batch) needs scalars as jaxpar.Term(weight, coef), by name; wrong: {wrong or terms}"
            )
        return {name: Term(collectives.vary(jnp.asarray(t.weight, jnp.float32)), t.coef) for name, t in terms.items()}

    def _whole_rows(self, batch: Batch) -> tuple[Batch, Batch]:
        """-> all positions of the rows, because weights may count rows as well as tokens; and this device's, in the
        order in which `seq` holds them. Rows come in their own order."""
        if self._sequence is None:
            return batch, batch
        dims = {name: position_dim(self.batch_axes, name) for name in batch}
        split = {name: dim for name, dim in dims.items() if dim is not None}
        whole = {name: jax.lax.all_gather(batch[name], "seq", axis=dim, tiled=True) for name, dim in split.items()}
        if self._sequence.natural:
            return batch | whole, batch
        held = {name: jnp.take(x, self._held(x.shape[split[name]]), axis=split[name]) for name, x in whole.items()}
        return batch | whole, batch | held

    def _held(self, positions: int) -> Array:
        """int32[position]: which positions of a row this device holds."""
        assert self._sequence is not None
        return collectives.vary(jnp.asarray(self._sequence.order(positions))[collectives.axis_index("seq")])

    def _check_saved(self, player: Player) -> None:
        met = set().union(*(chunks.gradient.met for chunks in player.chunks))
        if unknown := [name for name in self.plan.saved_names if name not in met]:
            raise PlanError(
                f"remat={self.plan.remat!r}: no layer saves {', '.join(map(repr, unknown))}; name it in the layer with "
                f"jaxpar.save(x, {unknown[0]!r}), or leave it out"
            )

    @property
    def _outer(self) -> dict[str, Placement]:
        return {path: p for path, p in self.placements.items() if p.info.stack is None}

    @property
    def _stages(self) -> int:
        return self.mesh.shape["pipe"]

    def _ends(self, params: Params) -> Ends:
        # In float32: a bfloat16 head would round the gradient of its weights before it is summed.
        outer = zero.fetch({path: params[path] for path in self._outer}, self._outer)
        return Ends(self.structure, self.placements, jax.tree.map(_at_least_float32, outer), self.plan.compute_dtype)

    def _chunks(self, params: Params) -> tuple[Chunks, ...]:
        found, depth = [], 0
        for stack in self.structure.stacks:
            placements = {path: self.placements[path] for path in self.structure.stack_params(stack)}
            layers = next(iter(placements.values())).layers
            assert layers is not None
            # [virtual stage, this stage, layer, ...] -> [place, ...].
            local = {path: params[path].reshape(-1, *params[path].shape[3:]) for path in placements}
            adds = self._stages > 1 or self.plan.microbatches > 1
            weights = StackWeights(local, placements, self.plan.compute_dtype, adds)
            layer: Layer = partial(apply_layer, self.structure, stack)
            if self.plan.precision == "fp8":
                layer = in_float8(layer, stack.name)
            offloads = "activations" in self.plan.offload
            gradient = LayerGradient(layer, self.plan.remat, self.plan.saved_names, offloads)
            found.append(Chunks(weights, gradient, _depths(layers, depth), not layers.even, layers.longest))
            depth += stack.length
        return tuple(found)

    def _context(self, batches: Batch, rows: Array, key: Array, train: bool) -> Context:
        """Contexts with the microbatches in front of every array."""
        count, length = rows.shape[0], local_positions(self.batch_axes, batches)
        index = None
        if length is not None:
            index = collectives.vary(jnp.arange(length, dtype=jnp.int32))
            if self._sequence is not None:
                index = self._held(length * self._sequence.devices)
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
            attention=Attend(self._sequence, self.mesh.shape["tensor"]),
            neighbours=Halo(self._sequence, self.plan.fill),
            routing=Route(
                self.plan.capacity, self.plan.expert_kernel == "pallas", self.plan.expert_exchange == "ragged"
            ),
            rules=self.plan.rules,
            sites=itertools.count(),
            whole_step=train and self.plan.microbatches == 1 and self._stages == 1,
        )


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


@dataclass(frozen=True)
class Attend:
    """`ctx.attend` on this mesh. A value, so that contexts of one plan are of one type."""

    sequence: SequenceLayout | None
    tensor: int

    def __call__(
        self, q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool, window: int | None
    ) -> Array:
        options: dict[str, Any] = {"causal": causal, "window": window}
        if self.sequence is None:
            return attend_on_tensor_shards(q, k, v, segments_q=segments, segments_k=segments, **options)
        return attend_over_sequence(q, k, v, layout=self.sequence, tensor=self.tensor, segments=segments, **options)


def _coefs(terms: dict[str, Term]) -> Totals:
    return {name: jnp.float32(t.coef) for name, t in terms.items()}


def _split[T](tree: T, parts: int) -> T:
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), tree)


def _scale(term: Term, weight: Array) -> Array:
    """d(objective) / d(total); 0 if nothing in the whole step counts."""
    return jnp.where(weight > 0, term.coef / jnp.where(weight > 0, weight, 1.0), 0.0)


def _zero_totals(terms: dict[str, Term]) -> Totals:
    return collectives.vary({name: jnp.zeros((), jnp.float32) for name in terms})


def _depths(layers: StageLayers, first: int) -> Array:
    """int32[place] of this stage: depth in the whole model; -1 where it holds no layer."""
    table = np.asarray([layers.depths(stage) for stage in range(layers.stages)], np.int32)
    table = np.where(table >= 0, table + first, -1).reshape(layers.stages, -1)
    return collectives.vary(jnp.asarray(table)[collectives.axis_index("pipe")])
