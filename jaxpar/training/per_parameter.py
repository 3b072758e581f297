"""Stateless transformations with a number for each parameter's path. What a mask has left out passes through."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax import Array


def scaled(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Each update times its factor."""
    return _elementwise(factors, 1.0, lambda update, param, factor: factor * update)


def decayed(decays: Mapping[str, float]) -> optax.GradientTransformation:
    """Each update plus its decay times the parameter; before the learning rate (Loshchilov and Hutter, 2019)."""
    return _elementwise(decays, 0.0, lambda update, param, decay: update + decay * param)


def _elementwise(
    values: Mapping[str, float], neutral: float, f: Callable[[Array, Array, float], Array]
) -> optax.GradientTransformation:
    def one(path: str, update: Any, param: Any) -> Any:
        return (
            update
            if isinstance(update, optax.MaskedNode) or values[path] == neutral
            else f(update, param, values[path])
        )

    def apply(updates: Any, params: Any) -> Any:
        return {path: one(path, update, params[path]) for path, update in updates.items()}

    return optax.stateless(apply)
