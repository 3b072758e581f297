"""A program on a mesh: its state, its steps, its evaluation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.batch import BatchAxes, batch_problems, batch_spec, check_batch
from jaxpar.collectives import sharding
from jaxpar.errors import PlanError
from jaxpar.evaluation import EvaluationSums, even_batches
from jaxpar.executor.options import init_options, step_options
from jaxpar.executor.region import Region, Sums
from jaxpar.executor.steered import learned
from jaxpar.executor.step import Metrics, gradients, metrics, row_ids, train_step
from jaxpar.mesh import ROW_AXES, count, row_shares
from jaxpar.placement import Placement, place, to_logical, to_storage
from jaxpar.plan import Plan
from jaxpar.state import StateLayout, TrainState
from jaxpar.structure import Build, Params, Structure, rebuild, split

HostBatch = Mapping[str, np.ndarray]

_GENERATOR = "threefry2x32"


@dataclass(frozen=True)
class Run:
    """Made by `Program.on`. Every function is compiled on first use and kept."""

    build: Build
    structure: Structure
    optimizer: optax.GradientTransformation
    plan: Plan
    batch_axes: BatchAxes
    mesh: Mesh

    # -- what lies where --

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return place(self.structure, self.plan, self.mesh)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @cached_property
    def layout(self) -> StateLayout:
        views = {path: jax.ShapeDtypeStruct(p.view_shape, p.info.dtype) for path, p in self.placements.items()}
        shapes = jax.eval_shape(self.optimizer.init, learned(views, self.placements))
        return StateLayout(self.placements, self.mesh, shapes, offloads="optimizer" in self.plan.offload)

    @cached_property
    def region(self) -> Region:
        return Region(self.structure, self.placements, self.plan, self.batch_axes, self.mesh)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state as stored."""
        return _abstract(self._init_state, self.layout.storage_shardings(), jax.random.key(0, impl=_GENERATOR))

    @cached_property
    def abstract_logical_state(self) -> TrainState:
        """Shapes, dtypes and shardings of what `to_logical` returns; the shapes are the same on every mesh."""
        return _abstract(self.layout.to_logical, self.layout.logical_shardings(), self.abstract_state)

    # -- state --

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, created sharded: no parameter is ever whole on one device. The same for every mesh.

        Random bits are threefry's, whatever jax's default: other generators give other bits to other shardings.
        """
        return self._init(jax.random.key(seed, impl=_GENERATOR))

    @cached_property
    def _init(self) -> Any:
        shardings = self.layout.storage_shardings()
        return jax.jit(self._init_state, out_shardings=shardings, compiler_options=init_options(self._platform))

    def _init_state(self, key: Array) -> TrainState:
        _, logical = split(self.build, key)
        params = to_storage(logical, self.placements)
        views = learned(self.layout.view(params), self.placements)
        opt_state = self.layout.at_rest(self.layout.store_opt(self.optimizer.init(views)))
        # Two arrays: donated together, they must not be one buffer.
        return TrainState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), key, params, opt_state)

    def to_logical(self, state: TrainState) -> TrainState:
        """The state as logical arrays: unpadded, layers in depth order. What checkpoints hold."""
        return self._to_logical(state)

    @cached_property
    def _to_logical(self) -> Any:
        return jax.jit(self.layout.to_logical, out_shardings=self.layout.logical_shardings())

    def from_logical(self, state: TrainState) -> TrainState:
        """The inverse of `to_logical`."""
        return self._from_logical(state)

    @cached_property
    def _from_logical(self) -> Any:
        return jax.jit(self.layout.from_logical, out_shardings=self.layout.storage_shardings())

    def logical_params(self, params: Params) -> Params:
        """Parameters or gradients as they are stored -> logical arrays, replicated."""
        return self._logical_params(params)

    @cached_property
    def _logical_params(self) -> Any:
        convert = partial(to_logical, placements=self.placements)
        return jax.jit(convert, out_shardings=NamedSharding(self.mesh, P()))

    def model(self, state: TrainState) -> nnx.Module:
        """The trained parameters as the user's own module, with global arrays on this mesh."""
        return rebuild(self.build, self.to_logical(state).params)

    # -- batches --

    @cached_property
    def row_share(self) -> tuple[int, int]:
        """(i, n): this process gives part i of n of each batch's rows, the same i where devices hold the same rows."""
        return row_shares(self.mesh)[jax.process_index()]

    @cached_property
    def _givers(self) -> list[int]:
        """One process for each part of the rows."""
        shares = row_shares(self.mesh)
        return list({shares[process]: process for process in sorted(shares, reverse=True)}.values())

    def put(self, batch: HostBatch) -> dict[str, Array]:
        """This process's rows (see `row_share`) -> global arrays.

        Raises `BatchError` or `PlanError` before anything compiles.
        """
        self._check(batch)
        rows = self.row_share[1]
        shapes = {n: jax.ShapeDtypeStruct((x.shape[0] * rows, *x.shape[1:]), x.dtype) for n, x in batch.items()}
        if problems := batch_problems(shapes, self.batch_axes, self.plan):
            raise PlanError(problems)
        return {name: self._put(np.asarray(x), batch_spec(self.batch_axes, name)) for name, x in batch.items()}

    def abstract_batch(self, shapes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes with the shardings that `put` gives."""
        return {
            name: jax.ShapeDtypeStruct(
                s.shape, s.dtype, sharding=sharding(self.mesh, batch_spec(self.batch_axes, name))
            )
            for name, s in shapes.items()
        }

    def _check(self, batch: HostBatch) -> None:
        check_batch(batch, self.batch_axes, self.structure.vocab_size)

    def _put(self, x: np.ndarray, spec: P) -> Array:
        whole = (x.shape[0] * self.row_share[1], *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding(self.mesh, spec), x, whole)

    # -- work --

    def step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """One optimizer update. Donates `state`. Metrics are float32 scalars:

        `loss` (the objective), each term's mean by its name, `weight/<term>` (its summed weight over the whole step),
        `grad_norm` (global, before clipping) and `skipped` (1 if the step changed nothing).
        """
        return self.compiled_step(state, batch)

    @cached_property
    def compiled_step(self) -> Any:
        """The jitted `step`, to lower or to inspect."""
        shardings = self.layout.storage_shardings()
        step = partial(train_step, self.region, self.layout, self.optimizer)
        outs = (shardings, NamedSharding(self.mesh, P()))
        return jax.jit(step, donate_argnums=0, out_shardings=outs, compiler_options=step_options(self._platform))

    def lower(self, shapes: Mapping[str, Any]) -> jax.stages.Lowered:
        """The step lowered for one step's batch of these global shapes, without a single array."""
        return self.compiled_step.lower(self.abstract_state, self.abstract_batch(shapes))

    def gradients(self, state: TrainState, batch: dict[str, Array]) -> tuple[Params, Metrics]:
        """Gradients (as stored, see `logical_params`) and metrics of one step, without an update."""
        return self._gradients(state, batch)

    @cached_property
    def _gradients(self) -> Any:
        def run(state: TrainState, batch: dict[str, Array]) -> tuple[Params, Metrics]:
            grads, sums = gradients(self.region, state, batch)
            return grads, metrics(sums)

        return jax.jit(run, out_shardings=(self.layout.update_shardings(), NamedSharding(self.mesh, P())))

    def evaluate(self, state: TrainState, batches: Iterable[HostBatch]) -> dict[str, float]:
        """The objective over every row of `batches` exactly once, forward alone.

        Each process gives its own rows, as many and in as many batches as it has; the last may be ragged. Returns
        `loss`, each term's mean, `weight/<term>`, and `rows`. Sums are divided once: no mean is taken of means.
        """
        sums = EvaluationSums()
        for batch, valid, rows in even_batches(batches, self._row_shards, self._check, self._givers):
            arrays = {name: self._put(x, batch_spec(self.batch_axes, name)) for name, x in batch.items()}
            whole = rows == valid.size * self.row_share[1]
            new = self._totals(state.params, arrays, state.key, self._put(valid, P(ROW_AXES)), one_by_one=not whole)
            sums.add(new, rows)
        return sums.result()

    @property
    def _row_shards(self) -> int:
        """How many shards this process's rows are cut into."""
        return count(self.mesh, ROW_AXES) // self.row_share[1]

    @cached_property
    def _totals(self) -> Any:
        def run(params: Params, batch: dict[str, Array], key: Array, valid: Array, *, one_by_one: bool) -> Sums:
            rows = row_ids(self.region, batch)
            return self.region.totals(params, batch, rows, key, valid, one_by_one)

        return jax.jit(run, static_argnames="one_by_one")


def _abstract(f: Any, shardings: Any, *args: Any) -> Any:
    def with_sharding(shape: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    return jax.tree.map(with_sharding, jax.eval_shape(f, *args), shardings)
