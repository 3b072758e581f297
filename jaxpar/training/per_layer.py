"""An optimizer for each layer by itself, though a stack's layers lie in one array.

What looks at a whole array (the root mean square of an update, a factored moment) would else mix the layers of a stack,
and mix other ones under another pipeline.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

from jaxpar.structure import ParamInfo

# The dims in front of a stack's parameters: virtual stage, stage, layer.
_LEAD = 3


def per_layer(inner: optax.GradientTransformation, params: Mapping[str, ParamInfo]) -> optax.GradientTransformation:
    """`inner` as if every layer of a stack had arrays of its own; all else goes through it unchanged.

    `inner` keeps for each parameter what depends on that parameter alone, and may have counters beside. One that mixes
    parameters, such as a clipped global norm, belongs outside: for it vmap raises a `ValueError`.
    """
    stacks = {path: info.stack for path, info in params.items()}

    def init(tree: Any) -> dict[str, Any]:
        return {name: _over_layers(name, inner.init, part)(part) for name, part in _groups(tree, stacks)}

    def update(updates: Any, state: dict[str, Any], tree: Any = None) -> tuple[Any, dict[str, Any]]:
        out, states = dict(updates), {}
        for name, part in _groups(updates, stacks):
            args = (part, state[name]) if tree is None else (part, state[name], {path: tree[path] for path in part})
            new, states[name] = _over_layers(name, inner.update, *args)(*args)
            out |= new
        return out, states

    return optax.GradientTransformation(init, update)


def _groups(tree: Mapping[str, Any], stacks: Mapping[str, str | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of each stack, under its name, and the rest under ``."""
    for name in dict.fromkeys(stacks[path] or "" for path in tree):
        yield name, {path: x for path, x in tree.items() if (stacks[path] or "") == name}


def _over_layers(stack: str, f: Any, *args: Any) -> Any:
    """`f` vmapped over the leading dims of every leaf under a parameter's name; counters stay single."""
    if not stack:
        return f
    paths = frozenset(args[0])

    def axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: 0 if _names(path) & paths else None, tree)

    def one_layer(x: Any, axis: int | None) -> Any:
        return x if axis is None else jax.ShapeDtypeStruct(x.shape[_LEAD:], x.dtype)

    ins = tuple(axes(arg) for arg in args)
    single = jax.tree.map(one_layer, args, ins)
    outs = axes(jax.eval_shape(f, *single))
    for _ in range(_LEAD):
        f = jax.vmap(f, in_axes=ins, out_axes=outs)
    return f


def _names(path: tuple[Any, ...]) -> set[Any]:
    return {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
