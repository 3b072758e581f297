"""An optimizer's updates from given gradients, worked out as a step does: on each device's shards."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxpar.placement import to_storage
from jaxpar.run import Run
from jaxpar.structure import ParamInfo

Logical = dict[str, np.ndarray]


def drawn(params: Mapping[str, ParamInfo], seed: int) -> Logical:
    """Logical float64 arrays."""
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=info.shape) for path, info in params.items()}


def trajectory(run: Run, params: Logical, gradients: list[Logical]) -> list[Logical]:
    """Logical parameters after each update, in float64, so that what differs is wrong and not rounding."""
    layout, optimizer, where = run.layout, run.optimizer, run.layout.update_shardings()

    def stored(tree):
        return to_storage(tree, run.placements)

    def start(params):
        return stored(params), layout.store_opt(optimizer.init(layout.view(stored(params))))

    def update(grads, state, params):
        view = layout.view(params)
        updates, state = optimizer.update(layout.view(stored(grads)), layout.view_opt(state), view)
        return layout.store({path: x + updates[path] for path, x in view.items()}), layout.store_opt(state)

    with jax.enable_x64(True):
        shardings = (where, layout.storage_shardings().opt_state)
        now, state = jax.jit(start, out_shardings=shardings)(params)
        step, found = jax.jit(update, out_shardings=shardings), []
        for grads in gradients:
            now, state = step(grads, state, now)
            found.append(jax.device_get(run.logical_params(now)))
    return found


def assert_equal(found: Logical, want: Logical, tolerance: float) -> None:
    """Raises `AssertionError` naming the leaf that differs by more than `tolerance` of its largest magnitude."""
    assert found.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, rtol=0, atol=tolerance * np.abs(x).max(), err_msg=path)
