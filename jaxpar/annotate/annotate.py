"""Shardings over `tensor` for a Flax model whose parameters have no names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from jaxpar.annotate.flat import VIEWS, Flat, flatten
from jaxpar.annotate.found import Annotated, Choice
from jaxpar.annotate.solve import Layout, Solution
from jaxpar.annotate.trace import ROUTE, Traced, trace
from jaxpar.annotate.why import why
from jaxpar.axis_rules import DEFAULT_RULES, Names
from jaxpar.errors import ModelError, PlanError
from jaxpar.mesh import MeshShape
from jaxpar.parallel.vocabulary import TABLE
from jaxpar.structure import Build, Structure, inspect_model, renamed


def auto_annotate(build: Build, batch_shapes: Mapping[str, jax.ShapeDtypeStruct], mesh: str | MeshShape) -> Annotated:
    """Names for the parameters of `build`'s model that split it over the mesh axis `tensor`.

    One layer of each stack is traced on one device, and an integer program chooses for every parameter which dim is
    split, if any: as much as can be without gathering anything, with the fewest bytes summed. Attention is split by
    heads, experts by their inner dim; tables that `jaxpar.embedding_lookup` and the cross-entropies use, by their
    rows. Other parameters outside the stacks stay whole. Names that a parameter has are kept.

    `batch_shapes`: of one step, e.g. `jaxpar.token_shapes(16, 512)`; `mesh`: as in a plan, `"data=-1,tensor=4"`.
    Raises `PlanError` where nothing is to be split, or nothing can be, and `ModelError` for what is no model.
    """
    shape = MeshShape.parse(mesh)
    if shape.tensor < 2:
        raise PlanError(f"mesh '{shape}' has tensor={shape.tensor}: there is nothing to split; choose 2 or more")
    structure = inspect_model(build)
    rows = max(1, shape.data) * max(1, shape.expert)
    own = {
        n: jax.ShapeDtypeStruct((max(1, x.shape[0] // rows), *x.shape[1:]), x.dtype) for n, x in batch_shapes.items()
    }
    layers, ends = trace(structure, own)
    found = [_Stack(structure, traced, shape.tensor) for traced in layers]
    choices = [*(choice for stack in found for choice in stack.choices()), *_outer(structure, ends)]
    if not any(choice.split for choice in choices):
        sizes = "; ".join(f"{c.path} {list(c.shape)}: {c.why}" for c in choices if len(c.shape) > 1)
        raise PlanError(f"nothing of this model can be split over tensor={shape.tensor}: {sizes}; choose another size")
    order = {path: i for i, path in enumerate(structure.params)}
    ordered = tuple(sorted(choices, key=lambda c: order[c.path]))
    moved = sum(stack.traced.layers * stack.solution.moved for stack in found)
    names = {c.path: c.names for c in ordered}
    return Annotated(renamed(build, names), ordered, round(moved), shape.tensor)


@dataclass(frozen=True)
class _Stack:
    structure: Structure
    traced: Traced
    tensor: int

    @cached_property
    def flat(self) -> Flat:
        return flatten(self.traced.closed)

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.flat, len(self.traced.paths), self.tensor, self.traced.routed)

    @cached_property
    def given(self) -> dict[int, int | None]:
        """Dims of parameters that have names already."""
        names = [self.structure.params[path].names for path in self.traced.paths]
        return {i: _split_dim(n) for i, n in enumerate(names) if any(name is not None for name in n)}

    @cached_property
    def solution(self) -> Solution:
        found = self.layout.solve(self.given)
        if found is None:
            named = [self.traced.paths[i] for i in self.given]
            raise ModelError(f"the names of {', '.join(named)} fit no layout without gathering; take some of them off")
        return found

    def choices(self) -> Iterator[Choice]:
        kernels = set(_routed_kernels(self.flat))
        for i, path in enumerate(self.traced.paths):
            info, dim = self.structure.params[path], self.solution.split[i]
            names = info.names
            if i not in self.given:
                names = tuple("tensor" if d == dim else None for d in range(len(info.dims)))
                names = ("experts", *names[1:]) if i in kernels else names
            yield Choice(path, info.dims, names, why(i, self.layout, self.solution, i in self.given))


def _split_dim(names: Names) -> int | None:
    axes = [name if name == "tensor" else DEFAULT_RULES.get(str(name)) for name in names]
    return axes.index("tensor") if "tensor" in axes else None


def _routed_kernels(flat: Flat) -> Iterator[int]:
    for op in flat.operations:
        if op.name.startswith(ROUTE):
            yield from (v.argument for v in op.ins[2:] if v.argument is not None)


def _outer(structure: Structure, ends: Traced) -> Iterator[Choice]:
    """Tables of the vocabulary are split by rows."""
    uses: dict[int, list[bool]] = {i: [] for i in range(len(ends.paths))}
    for op in flatten(ends.closed).operations:
        for value in op.ins:
            if value.argument in uses and not (op.name in VIEWS and op.outs[0].argument == value.argument):
                uses[value.argument].append(op.params.get("name") == TABLE)
    for i, path in enumerate(ends.paths):
        info = structure.params[path]
        if any(name is not None for name in info.names):
            yield Choice(path, info.dims, info.names, "named so")
        elif len(info.dims) == 2 and uses[i] and all(uses[i]):
            yield Choice(path, info.dims, ("vocab", None), "a table of the vocabulary, split by rows")
        else:
            yield Choice(path, info.dims, (None,) * len(info.dims), _whole(info.dims, uses[i]))


def _whole(dims: Sequence[int], uses: Sequence[bool]) -> str:
    if prod(dims) and any(uses):
        return "whole: used as a table of the vocabulary, and otherwise too"
    return "whole: outside the stacks; for a large head use jaxpar.cross_entropy" if len(dims) > 1 else "whole: small"
