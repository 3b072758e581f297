"""Updates of parameters that are kept in fewer than 32 bits: without care, small ones are rounded away.

An optimizer inside sees float32 parameters and keeps float32 moments. Parameters of 32 bits pass through unchanged.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import BFloat16, Float, Int, UInt32

from jaxpar.dropout import mix
from jaxpar.errors import ConfigError
from jaxpar.structure import Params

# By parameter of a stack: int32[virtual stage, stage, layer], which layer lies there.
Depths = Mapping[str, np.ndarray]


class MasterState(NamedTuple):
    """`master`: float32, of the parameters that are kept in fewer bits, and of no others."""

    inner: Any
    master: Params


def float32_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on float32 copies, kept beside it and sharded like it; parameters are their nearest values.

    Micikevicius et al., Mixed Precision Training (2018). Four more bytes a parameter.
    """

    def init(params: Params) -> MasterState:
        return MasterState(inner.init(_float32(params)), _float32(_low(params)))

    def update(updates: Any, state: MasterState, params: Params) -> tuple[Any, MasterState]:
        exact = _float32(params) | state.master
        updates, inner_state = inner.update(updates, state.inner, exact)
        master = optax.apply_updates({path: exact[path] for path in state.master}, _part(updates, state.master))
        rounded = {path: x.astype(params[path].dtype) for path, x in master.items()}
        return updates | _differences(rounded, params), MasterState(inner_state, master)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


class RoundingState(NamedTuple):
    """`updates`: how many there were."""

    inner: Any
    updates: Int[Array, ""]


def stochastic_rounding(inner: optax.GradientTransformation, seed: int = 0) -> optax.GradientTransformation:
    """`inner` on bfloat16 parameters, rounded up or down at random so that the mean is exact. No copy is kept.

    The bits are a function of seed, update, parameter and element alone, the same on every mesh; `layer_depths` (a
    step gives it, see `StateLayout.layer_depths`) tells which layers a pipeline stores where. Raises `ConfigError` for
    parameters of fewer than 32 bits that are not bfloat16.
    """

    def init(params: Params) -> RoundingState:
        for path, x in _low(params).items():
            if x.dtype != jnp.bfloat16:
                raise ConfigError(f"stochastic rounding: {path} is {x.dtype}; keep it in bfloat16 or in float32")
        return RoundingState(inner.init(_float32(params)), jnp.zeros((), jnp.int32))

    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Any, state: RoundingState, params: Params, *, layer_depths: Depths | None = None, **extra: Any
    ) -> tuple[Any, RoundingState]:
        updates, inner_state = inner.update(updates, state.inner, _float32(params), layer_depths=layer_depths, **extra)
        depths = layer_depths or {}
        low = _float32(_low(params))
        exact = optax.apply_updates(low, _part(updates, low))
        key = jax.random.fold_in(jax.random.key(seed), state.updates)
        rounded = {
            path: round_at_random(
                exact[path], _bits(jax.random.fold_in(key, place), exact[path].shape, depths.get(path))
            )
            for place, path in enumerate(sorted(exact))
        }
        return updates | _differences(rounded, params), RoundingState(inner_state, state.updates + 1)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def round_at_random(x: Float[Array, "*n"], bits: UInt32[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """One of the two bfloat16 neighbours of float32 `x`; by 16 random `bits`, the nearer one more often."""
    words = lax.bitcast_convert_type(x, jnp.uint32) + (bits & jnp.uint32(0xFFFF))
    rounded = lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _bits(key: Array, shape: tuple[int, ...], depths: np.ndarray | None) -> Array:
    """A hash of each element's place in the logical array: cheap, and without communication."""
    place, stride, lead = jnp.zeros(shape, jnp.uint32), 1, 0 if depths is None else depths.ndim
    for dim in reversed(range(lead, len(shape))):
        place = place + lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    if depths is not None:
        layers = depths.astype(np.uint32) * np.uint32(stride % 2**32)
        place = place + layers.reshape(depths.shape + (1,) * (len(shape) - lead))
    return mix(jax.random.bits(key, (), jnp.uint32) ^ mix(place))


def _low(params: Params) -> Params:
    return {path: x for path, x in params.items() if _is_low(x)}


def _is_low(x: Any) -> bool:
    """What a mask has left out is not."""
    return not isinstance(x, optax.MaskedNode) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def _float32(params: Params) -> Params:
    low = _low(params)
    return {path: x.astype(jnp.float32) if path in low else x for path, x in params.items()}


def _part(updates: Params, of: Params) -> Params:
    return {path: updates[path] for path in of}


def _differences(rounded: Params, params: Params) -> Params:
    """What `optax.apply_updates` has to add, in float32, so that the sum is exactly `rounded`."""
    return {path: x.astype(jnp.float32) - params[path].astype(jnp.float32) for path, x in rounded.items()}
