"""The training state, and the optimizer's view of it: logical sizes, with each state leaf following its parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from jaxpar import offload
from jaxpar.collectives import sharding
from jaxpar.optimizer_state import leaf_placements
from jaxpar.placement import Placement, logical_one, logical_sharding, pad, store_one, unpad
from jaxpar.structure import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a run needs to go on. Arrays are stored as their placement says; see `Run.to_logical`.

    Attributes:
      step: batches consumed, skipped ones too.
      skipped: of these, how many changed nothing: a loss or gradient that was not finite, or nothing to learn from.
      key: the run's random key; a step's key is this one folded with `step`.
    """

    step: Int[Array, ""]
    skipped: Int[Array, ""]
    key: Array
    params: Params
    opt_state: optax.OptState


@dataclass(frozen=True)
class StateLayout:
    """Which placement each leaf of the state follows, and the conversions that come from it."""

    placements: Mapping[str, Placement]
    mesh: Mesh
    opt_shapes: Any
    """The optimizer's state for `view` parameters, abstract."""
    offloads: bool = False
    """Whether the optimizer's state lies in host memory between steps."""

    def view(self, params: Params) -> Params:
        """Without padding, `[virtual stage, stage, layer, *dims]`: what the optimizer is given."""
        return {path: unpad(x, self.placements[path].info.dims) for path, x in params.items()}

    def store(self, params: Params) -> Params:
        return {path: pad(x, self.placements[path].padded) for path, x in params.items()}

    def view_opt(self, opt_state: Any) -> Any:
        return self._map_opt(opt_state, lambda x, p: x if p is None else unpad(x, p.info.dims))

    def store_opt(self, opt_state: Any) -> Any:
        return self._map_opt(opt_state, lambda x, p: x if p is None else pad(x, p.padded))

    def at_rest(self, opt_state: Any) -> Any:
        """The optimizer's state where it lies between steps."""
        return self._move(opt_state, offload.to_host)

    def at_work(self, opt_state: Any) -> Any:
        """The inverse of `at_rest`: on the device."""
        return self._move(opt_state, offload.to_device)

    def storage_shardings(self) -> TrainState:
        scalar: Any = NamedSharding(self.mesh, P())
        params: Any = {path: sharding(self.mesh, p.param_spec()) for path, p in self.placements.items()}
        opt = self._map_opt(self.opt_shapes, lambda _, p: sharding(self.mesh, P() if p is None else p.update_spec()))
        return TrainState(scalar, scalar, scalar, params, self._resting(opt))

    def logical_shardings(self) -> TrainState:
        """For the arrays of `to_logical`, which are not padded: replicated where a dim does not divide."""
        scalar: Any = NamedSharding(self.mesh, P())
        params: Any = {path: logical_sharding(p, self.mesh, p.param_spec()) for path, p in self.placements.items()}
        opt = self._map_opt(
            self.opt_shapes, lambda _, p: scalar if p is None else logical_sharding(p, self.mesh, p.update_spec())
        )
        return TrainState(scalar, scalar, scalar, params, self._resting(opt))

    def _resting(self, shardings: Any) -> Any:
        """Those of `at_rest`, of stored and of logical arrays: a checkpoint is not to need what the device lacks."""
        return self._move(shardings, offload.on_host)

    def _move(self, tree: Any, move: Any) -> Any:
        """`move(leaf)` of what is worth it, told by the sizes without padding."""
        if not self.offloads:
            return tree
        return jax.tree.map(lambda x, leaf: move(leaf) if offload.worth_moving(x) else leaf, self.opt_shapes, tree)

    def to_logical(self, state: TrainState) -> TrainState:
        """Every parameter, and what the optimizer keeps for it, in its logical shape with layers in depth order."""

        def convert(x: Array, p: Placement | None) -> Array:
            return x if p is None else logical_one(x, p)

        return self._convert(state, convert)

    def from_logical(self, state: TrainState) -> TrainState:
        """The inverse of `to_logical`."""

        def convert(x: Array, p: Placement | None) -> Array:
            return x if p is None else store_one(x, p)

        return self._convert(state, convert)

    def update_shardings(self) -> dict[str, NamedSharding]:
        return {path: sharding(self.mesh, p.update_spec()) for path, p in self.placements.items()}

    def _convert(self, state: TrainState, convert: Any) -> TrainState:
        params = {path: convert(x, self.placements[path]) for path, x in state.params.items()}
        opt = self.at_rest(self._map_opt(self.at_work(state.opt_state), convert))
        return TrainState(state.step, state.skipped, state.key, params, opt)

    def _map_opt(self, tree: Any, f: Any) -> Any:
        """`f(leaf, placement or None)` of every optimizer leaf."""
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, [f(x, p) for x, p in zip(leaves, self.opt_placements, strict=True)])

    @cached_property
    def layer_depths(self) -> dict[str, np.ndarray]:
        """By parameter of a stack, int32[virtual stage, stage, layer]: the layer's depth in its stack.

        Given to `optimizer.update` by this name, for what must not depend on where a pipeline stores a layer.
        """
        return {path: p.layers.stored_depths for path, p in self.placements.items() if p.layers is not None}

    @cached_property
    def opt_placements(self) -> list[Placement | None]:
        """Of every leaf of the optimizer's state. Raises `PlanError`, see `leaf_placements`."""
        return leaf_placements(self.opt_shapes, self.placements)
