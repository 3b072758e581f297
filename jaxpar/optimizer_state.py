"""Where each leaf of an optimizer's state lies: with the parameter whose name stands on its path.

Works for any chain of optax transformations: matched are names and shapes, never a transformation's type. A factored
moment has only some of its parameter's dims, and follows those.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.errors import PlanError
from jaxpar.placement import Placement

# Elements. What is smaller (counters, hyperparameters, coefficients) may be whole on every device.
SMALL = 1024

# For each dim of a leaf, which of its parameter's dims it is; None: none of them, and of size 1.
Kept = tuple[int | None, ...]


def leaf_placements(shapes: Any, placements: Mapping[str, Placement]) -> list[Placement | None]:
    """For each leaf of an abstract optimizer state, where it lies; None: small, and replicated.

    Raises `PlanError` naming every larger leaf that follows no parameter: it would be whole on every device.
    """
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    found = [_leaf_placement(path, leaf.shape, placements) for path, leaf in leaves]
    problems = [
        _problem(path, leaf, placements)
        for (path, leaf), placement in zip(leaves, found, strict=True)
        if placement is None and leaf.size > SMALL
    ]
    if problems:
        raise PlanError(problems)
    return found


def _leaf_placement(
    path: tuple[Any, ...], shape: tuple[int, ...], placements: Mapping[str, Placement]
) -> Placement | None:
    owner = _owner(path, placements)
    if owner is None or shape[: len(owner.lead)] != owner.lead:
        return None
    kept = _kept(shape[len(owner.lead) :], owner)
    return None if kept is None else _with_dims(owner, kept)


def _owner(path: tuple[Any, ...], placements: Mapping[str, Placement]) -> Placement | None:
    keys = [getattr(key, "key", None) for key in reversed(path)]
    return next((placements[key] for key in keys if isinstance(key, str) and key in placements), None)


def _kept(sizes: tuple[int, ...], owner: Placement) -> Kept | None:
    """The dims of `owner` that a leaf of these sizes has; of several answers the one that is split the most."""
    dims = owner.info.dims
    choices = [
        kept for kept in itertools.combinations(range(len(dims)), len(sizes)) if tuple(dims[d] for d in kept) == sizes
    ]
    if choices:
        return max(choices, key=lambda kept: sum(_is_split(owner, d) for d in kept))
    return (None,) * len(sizes) if all(size == 1 for size in sizes) else None


def _is_split(owner: Placement, dim: int) -> bool:
    return dim in dict(owner.parts) or dim == owner.zero_dim or owner.tensor_spec[dim] is not None


def _with_dims(owner: Placement, kept: Kept) -> Placement:
    """The placement of something that has these of a parameter's dims."""
    info, dims = owner.info, owner.info.dims
    sizes = tuple(1 if d is None else dims[d] for d in kept)
    shape = sizes if info.stack is None else (info.shape[0], *sizes)
    return replace(
        owner,
        info=replace(info, shape=shape, names=tuple(None if d is None else info.names[d] for d in kept)),
        padded=tuple(1 if d is None else owner.padded[d] for d in kept),
        tensor_spec=P(*(None if d is None else owner.tensor_spec[d] for d in kept)),
        zero_dim=kept.index(owner.zero_dim) if owner.zero_dim is not None and owner.zero_dim in kept else None,
        parts=tuple((kept.index(dim), axis) for dim, axis in owner.parts if dim in kept),
    )


def _problem(path: tuple[Any, ...], leaf: Any, placements: Mapping[str, Placement]) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    owner = _owner(path, placements)
    if owner is None:
        follows = "no parameter's name stands on its path"
    else:
        follows = f"it belongs to {owner.info.path}, which the optimizer sees as {list(owner.view_shape)}"
    return (
        f"optimizer state {name}: {leaf.dtype}{list(leaf.shape)} follows no parameter and would be whole on every "
        f"device ({follows}); keep state in trees like the parameters, of their dims or some of them, and wrap what "
        f"takes statistics of one array in jaxpar.per_layer, so that the layers of a stack stay apart"
    )
