"""What a model is made of, learned from its build function without making a single array.

Parameters live in flat dicts `path -> array`; those of a stack are named `stack.path` and have the layers in front.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.axis_rules import Names
from jaxpar.errors import ModelError
from jaxpar.model import FLOAT32, LOGICAL_NAMES, STEERED, Stack, logical_names

Params = dict[str, Array]
Build = Callable[..., nnx.Module]


@dataclass(frozen=True)
class ParamInfo:
    """One logical parameter: `shape` is that of the user's own module, a stack's with the layers in front."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: Names
    stack: str | None
    float32: bool = False
    """Whether the model is given it in its own dtype, whatever the plan's precision."""
    steered: float | None = None
    """The rate of a `jaxpar.steered` parameter."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape without the layer dim: what `names` and shardings speak of."""
        return self.shape if self.stack is None else self.shape[1:]


@dataclass(frozen=True)
class StackInfo:
    name: str
    length: int
    graphdef: nnx.GraphDef


@dataclass(frozen=True)
class Structure:
    """The static side of a model: graph definitions to merge parameters into, and what its parameters are.

    `mixing`: paths of the modules whose class says `mixes_positions = True`; `step_wide`: of those that say, class or
    module, `needs_whole_step = True`.
    """

    graphdef: nnx.GraphDef
    stacks: tuple[StackInfo, ...]
    params: Mapping[str, ParamInfo]
    mixing: tuple[str, ...] = ()
    step_wide: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return sum(s.length for s in self.stacks)

    @property
    def stack_lengths(self) -> dict[str, int]:
        """How many layers each stack has, by name, in depth order."""
        return {stack.name: stack.length for stack in self.stacks}

    @property
    def vocab_size(self) -> int | None:
        """The size of the dims named `vocab`, if the model has one."""
        sizes = {n for i in self.params.values() for name, n in zip(i.names, i.dims, strict=True) if name == "vocab"}
        return min(sizes) if sizes else None

    def outer(self, params: Mapping[str, Array]) -> Any:
        """The module without its stacks: embedding, head, terms."""
        return merge(self.graphdef, {p: params[p] for p, i in self.params.items() if i.stack is None})

    def stack_params(self, stack: StackInfo) -> dict[str, ParamInfo]:
        return {p: i for p, i in self.params.items() if i.stack == stack.name}

    def layer(self, stack: StackInfo, params: Mapping[str, Array]) -> Any:
        """One layer of a stack as a module; `params` without the layer dim."""
        prefix = len(stack.name) + 1
        return merge(stack.graphdef, {path[prefix:]: value for path, value in params.items()})


def merge(graphdef: nnx.GraphDef, flat: Mapping[str, Array]) -> Any:
    state = nnx.from_flat_state({tuple(_keys(path)): value for path, value in flat.items()})
    return nnx.merge(graphdef, state)


def inspect_model(build: Build) -> Structure:
    """Builds the model abstractly. Raises `ModelError` for what does not follow the protocol."""
    found: list[Structure] = []

    def trace(key: Array) -> Params:
        structure, params = split(build, key)
        found.append(structure)
        return params

    jax.eval_shape(trace, jax.random.key(0))
    return found[0]


def split(build: Build, key: Array) -> tuple[Structure, Params]:
    """Builds the model, under any trace, into its structure and its logical parameters."""
    with nnx.use_eager_sharding(False):
        model = _call(build, nnx.Rngs(key))
    _check_protocol(model)
    mixing, step_wide = _saying(model, "mixes_positions"), _saying(model, "needs_whole_step")
    stacks = _take_stacks(model)
    graphdef, params, infos = _split_module(model, "", None)
    stack_infos = []
    for name, stack in stacks.items():
        layer_graph, layer_params, layer_infos = _split_module(stack.layers, f"{name}.", name)
        stack_infos.append(StackInfo(name, stack.length, layer_graph))
        params |= layer_params
        infos |= layer_infos
    return Structure(graphdef, tuple(stack_infos), infos, mixing, step_wide), params


def rebuild(build: Build, params: Params) -> nnx.Module:
    """The user's whole module, stacks included, with these logical parameters."""
    found: list[nnx.GraphDef] = []

    def trace(key: Array) -> None:
        with nnx.use_eager_sharding(False):
            found.append(nnx.graphdef(_call(build, nnx.Rngs(key))))

    jax.eval_shape(trace, jax.random.key(0))
    stacks = {s.name for s in inspect_model(build).stacks}
    return merge(found[0], {_inside_stack(path, stacks): value for path, value in params.items()})


def stored_as(build: Build, dtype: Any) -> Build:
    """The same model with float parameters in `dtype`; drawn in the model's own, so that only their rounding differs.

    Parameters that the model itself keeps in fewer bits, or in float32 by name, stay as they are.
    """

    def cast(rngs: nnx.Rngs) -> nnx.Module:
        model = _call(build, rngs)
        parts: Any = nnx.split(model, nnx.Param, ...)
        graphdef, params, rest = parts
        return nnx.merge(graphdef, nnx.map_state(lambda _, param: _narrowed(param, jnp.dtype(dtype)), params), rest)

    return cast


def _narrowed(param: nnx.Variable, dtype: Any) -> nnx.Variable:
    x = param.get_value()
    narrower = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > dtype.itemsize
    return param.replace(x.astype(dtype)) if narrower and not param.get_metadata().get(FLOAT32) else param


def renamed(build: Build, names: Mapping[str, Names]) -> Build:
    """The same model, its parameters with these logical names, by path."""

    def named(rngs: nnx.Rngs) -> nnx.Module:
        model = _call(build, rngs)
        stacks = {name for name, value in vars(model).items() if isinstance(value, Stack)}
        inside = {_inside_stack(path, stacks): mine for path, mine in names.items()}
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and _path(path) in inside:
                node.set_metadata(LOGICAL_NAMES, inside[_path(path)])
        return model

    return named


def _inside_stack(path: str, stacks: set[str]) -> str:
    stack, _, rest = path.partition(".")
    return f"{stack}.layers.{rest}" if stack in stacks else path


def _call(build: Build, rngs: nnx.Rngs) -> nnx.Module:
    parameters = inspect.signature(build).parameters
    # The signature of a module class is its metaclass': anything by name.
    by_name = "rngs" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return build(rngs=rngs) if by_name else build(rngs)


def _check_protocol(model: Any) -> None:
    missing = [m for m in ("embed", "head", "terms") if not callable(getattr(model, m, None))]
    if missing:
        raise ModelError(
            f"{type(model).__name__} lacks {', '.join(missing)}; a model needs embed(batch, ctx), head(x, batch, ctx) "
            f"and terms(batch) (see jaxpar.model)"
        )


def _saying(model: nnx.Module, what: str) -> tuple[str, ...]:
    """Paths of the modules with this attribute. In a stack, all layers are one module."""
    nodes = nnx.iter_graph(model)
    found = (path for path, node in nodes if isinstance(node, nnx.Module) and getattr(node, what, False))
    return tuple(sorted(_path(path).replace(".layers", "", 1) for path in found))


def _take_stacks(model: Any) -> dict[str, Stack]:
    stacks = {name: value for name, value in vars(model).items() if isinstance(value, Stack)}
    if not stacks:
        raise ModelError(f"{type(model).__name__} has no stack of layers; make one with jaxpar.stack(Layer, n, ...)")
    for name in stacks:
        delattr(model, name)
    hidden = [".".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, Stack)]
    if hidden:
        raise ModelError(f"stacks must be attributes of the model itself, found one inside: {', '.join(hidden)}")
    return stacks


def _split_module(module: nnx.Module, prefix: str, stack: str | None) -> Any:
    parts: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, rest = parts
    other = [prefix + _path(path) for path, _ in nnx.to_flat_state(rest)]
    if other:
        raise ModelError(
            f"{type(module).__name__} holds state that is not a parameter: {', '.join(other)}. It would be dropped or "
            f"differ between devices; for dropout use ctx.dropout(x, rate) in place of nnx.Dropout"
        )
    params: Params = {}
    infos: dict[str, ParamInfo] = {}
    leaves: Any = nnx.to_flat_state(state)
    for path, variable in leaves:
        name = prefix + _path(path)
        value = variable.get_value()
        metadata = variable.get_metadata()
        exact, rate = bool(metadata.get(FLOAT32)), metadata.get(STEERED)
        names = _names(name, variable, value.ndim - (stack is not None))
        infos[name] = ParamInfo(name, tuple(value.shape), value.dtype, names, stack, exact, rate)
        params[name] = value
    return graphdef, params, infos


def _names(path: str, variable: nnx.Variable, rank: int) -> Names:
    names = logical_names(variable, rank)
    if len(names) != rank:
        raise ModelError(f"{path} has {rank} dims (without the layer dim) but {len(names)} logical names: {names}")
    return names


def _path(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))


def _keys(path: str) -> list[Any]:
    return [int(k) if k.isdigit() else k for k in path.split(".")]
