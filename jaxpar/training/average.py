"""Averages of the parameters over training: kept in the optimizer's state, sharded like it, used to evaluate."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxpar.errors import ConfigError
from jaxpar.run import Run
from jaxpar.state import StateLayout, TrainState
from jaxpar.structure import Params


class AverageState(NamedTuple):
    """`average`: like the parameters, of their dtypes."""

    updates: Int[Array, ""]
    average: Params


def parameter_average(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of the parameters; passes updates on. Comes last in a chain.

    While it is young, it weighs what is new by `9 / (10 + updates)`, so that the initial parameters are soon forgotten.
    """
    if not 0 < decay < 1:
        raise ConfigError(f"the decay of a parameter average must lie between 0 and 1, found {decay}")

    def init(params: Params) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: AverageState, params: Params) -> tuple[Any, AverageState]:
        keep = jnp.minimum(decay, (1 + state.updates) / (10 + state.updates))
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, x: (keep * old + (1 - keep) * x).astype(old.dtype), state.average, new)
        return updates, AverageState(state.updates + 1, average)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def to_averaged(run: Run) -> Callable[[TrainState], TrainState]:
    """A function: the state with averaged parameters, to evaluate or to export, as stored; the given state lives on.

    The average is that of `parameter_average`, or the `x` of `optax.contrib.schedule_free` (Defazio et al., 2024); a
    parameter without one, such as a frozen one, is as it is. Without any average: the identity.
    """
    if not _nodes(run.layout.opt_shapes):
        return lambda state: state
    shardings = run.layout.storage_shardings().params
    convert = jax.jit(partial(_averaged_params, run.layout), out_shardings=shardings)
    return lambda state: replace(state, params=convert(state.params, state.opt_state))


def _averaged_params(layout: StateLayout, params: Params, opt_state: Any) -> Params:
    view, averages = layout.view(params), dict[str, Array]()
    for node in _nodes(layout.view_opt(layout.at_work(opt_state))):
        averages |= _average(node, view)
    return params | layout.store({path: x.astype(params[path].dtype) for path, x in averages.items()})


def _average(node: AverageState | ScheduleFreeState, view: Params) -> Params:
    if isinstance(node, AverageState):
        return _present(node.average)
    z = _present(node.z)
    return schedule_free_eval_params(node._replace(z=z), {path: view[path] for path in z})


def _nodes(opt_state: Any) -> list[AverageState | ScheduleFreeState]:
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_average) if _is_average(node)]


def _is_average(node: Any) -> bool:
    return isinstance(node, AverageState | ScheduleFreeState)


def _present(tree: Any) -> Params:
    """Without what a mask has left out."""
    return {path: x for path, x in tree.items() if not isinstance(x, optax.MaskedNode)}
