"""One whole train step: the manual region, then ordinary jit code on global arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import collectives
from jaxpar.executor.ends import Batch
from jaxpar.executor.region import Region, Sums
from jaxpar.executor.steered import learned, moved
from jaxpar.mesh import ROW_AXES
from jaxpar.state import StateLayout, TrainState
from jaxpar.structure import Params

Metrics = dict[str, Array]


def gradients(region: Region, state: TrainState, batch: Batch) -> tuple[Params, Sums]:
    """Gradients (storage shapes) and sums of one step."""
    key = jax.random.fold_in(state.key, state.step)
    return region.gradients(state.params, batch, row_ids(region, batch), key)


def row_ids(region: Region, batch: Batch) -> Array:
    """Global row ids: the row's place in the step's global batch."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    return lax.with_sharding_constraint(
        jnp.arange(rows, dtype=jnp.int32), collectives.sharding(region.mesh, P(ROW_AXES))
    )


def train_step(
    region: Region, layout: StateLayout, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """-> the next state, metrics. A step whose loss or gradient is not finite, or in which nothing counts, changes
    nothing but the counters."""
    grads, sums = gradients(region, state, batch)
    grads = layout.view(grads)
    norm, loss = optax.tree.norm(learned(grads, layout.placements)), sums.objective()
    counts = jnp.stack(list(sums.weights.values())).max() > 0
    good = jnp.isfinite(norm) & jnp.isfinite(loss) & counts
    old_opt_state = layout.at_work(state.opt_state)
    params, opt_state = _update(layout, optimizer, state.params, old_opt_state, grads)

    def keep(new: Any, old: Any, good: Array) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

    params = keep(params, state.params, good)
    opt_state = keep(opt_state, old_opt_state, _once_written(region.mesh, params, good))
    skipped = 1 - good.astype(jnp.int32)
    new_state = TrainState(
        step=state.step + 1,
        skipped=state.skipped + skipped,
        key=state.key,
        params=params,
        opt_state=layout.at_rest(opt_state),
    )
    return new_state, metrics(sums) | {"grad_norm": norm, "skipped": skipped.astype(jnp.float32)}


def _once_written(mesh: Mesh, params: Params, good: Array) -> Array:
    """`good`, but on CPU to be had only when the parameters are written.

    XLA for CPU writes each array in a loop of its own. Those of the parameters read the old moments, which it would
    copy lest they be overwritten first; XLA for GPU writes a parameter and its moments together.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return good
    return lax.optimization_barrier((params, good))[1]


def metrics(sums: Sums) -> Metrics:
    """`loss`, each term's mean, and `weight/<term>`."""
    weights = {f"weight/{name}": w for name, w in sums.weights.items()}
    return {"loss": sums.objective(), **sums.means(), **weights}


def _update(
    layout: StateLayout, optimizer: optax.GradientTransformation, params: Params, opt_state: Any, grads: Params
) -> tuple[Params, Any]:
    """The optimizer works on each device's ZeRO shard; parameters that are stored whole are gathered after it."""
    params = layout.view(lax.with_sharding_constraint(params, layout.update_shardings()))
    update = optax.with_extra_args_support(optimizer).update
    own, by_loss = (learned(tree, layout.placements) for tree in (params, grads))
    updates, opt_state = update(by_loss, layout.view_opt(opt_state), own, layer_depths=layout.layer_depths)
    new = layout.store(optax.apply_updates(own, updates) | moved(params, grads, layout.placements))
    new = lax.with_sharding_constraint(new, layout.update_shardings())
    return new, layout.store_opt(opt_state)
