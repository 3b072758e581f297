"""Parameters that counts move, and no optimizer: see `jaxpar.steered`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpar.placement import Placement
from jaxpar.structure import Params


def learned[T](params: Mapping[str, T], placements: Mapping[str, Placement]) -> dict[str, T]:
    """Those that the optimizer moves."""
    return {path: x for path, x in params.items() if placements[path].info.steered is None}


def moved(params: Params, counts: Params, placements: Mapping[str, Placement]) -> Params:
    """The others after a step, from their sizes without padding and what was counted for each; mean and sign are taken
    over the last dim, a layer's own."""
    rates = {path: p.info.steered for path, p in placements.items() if p.info.steered is not None}
    return {path: _moved(params[path], counts[path], rate) for path, rate in rates.items()}


def _moved(bias: Array, counts: Array, rate: Any) -> Array:
    fewer = jnp.mean(counts, axis=-1, keepdims=True) - counts
    return bias + (rate * jnp.sign(fewer)).astype(bias.dtype)
