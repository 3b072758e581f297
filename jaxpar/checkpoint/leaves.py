"""The leaves of a training state by name, and what keeps those of a checkpoint from fitting those of a run."""

from collections.abc import Mapping
from typing import Any

import jax

# Leaf name -> [shape, dtype], as JSON.
Table = Mapping[str, list[Any]]

_SHOWN = 20


def by_name(state: Any) -> dict[str, Any]:
    """Every leaf by its path, e.g. `params/blocks.mlp.up.kernel`, `opt_state/1/0/mu/norm.scale`."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def from_names[T](leaves: Mapping[str, Any], like: T) -> T:
    """The inverse of `by_name`, for a state of the same structure as `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in by_name(like)])


def table(state: Any) -> dict[str, list[Any]]:
    """Shapes and dtypes of arrays or of abstract ones; a random key's dtype names its implementation."""
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in by_name(state).items()}


def differences(found: Table, needed: Table) -> list[str]:
    """What does not fit, a line for each leaf: missing, unexpected, or of another shape or dtype."""
    lines = [f"{name}: missing in the checkpoint, needed {_show(needed[name])}" for name in needed if name not in found]
    lines += [
        f"{name}: {_show(found[name])} in the checkpoint, not in the model" for name in found if name not in needed
    ]
    for name in needed:
        if name in found and list(found[name]) != needed[name]:
            lines.append(f"{name}: needed {_show(needed[name])}, found {_show(found[name])}")
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"... and {more} more leaves"]


def _show(leaf: list[Any]) -> str:
    shape, dtype = leaf
    return f"{dtype}{list(shape)}"
