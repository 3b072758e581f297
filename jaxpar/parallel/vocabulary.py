"""The vocabulary shared over the stages of a pipeline.

All stages embed and score every microbatch together, each with its slice of the rows of the tables, so that the ends
of the pipeline are no slower than its middle. Model code is handed the slices: `embedding_lookup` and the
cross-entropies know what they are, anything else would take a slice for the whole, and is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxpar import collectives
from jaxpar.errors import PlanError
from jaxpar.structure import Params

_MARK = "jaxpar.vocabulary"
# Every table that is looked up or scored against, whether it is a slice or not.
TABLE = "jaxpar.table"

# What may lie between a table and the function that it is handed to.
_HARMLESS = ("convert_element_type", "copy")

# How many rows the whole table has, by the rows of a slice.
_whole: ContextVar[Mapping[int, int]] = ContextVar("whole", default=MappingProxyType({}))


@contextmanager
def shared(whole: Mapping[int, int]) -> Iterator[None]:
    """Tables of so many rows (the keys) are slices of tables of so many (the values), while this is traced."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def slice_of(table: Array) -> tuple[Array, int, int | Array | None]:
    """-> the table, the rows of the whole, and where a slice starts in it; None: the table is whole."""
    table, rows = checkpoint_name(table, TABLE), table.shape[0]
    if rows not in _whole.get():
        return table, rows, None
    return checkpoint_name(table, _MARK), _whole.get()[rows], collectives.axis_index("pipe") * rows


def check_uses(f: Callable[[Params], Any], outer: Params, slices: set[str]) -> None:
    """Raises `PlanError` if `f` uses a slice where jaxpar cannot know what it is, or takes another table for one."""
    closed, _ = jax.make_jaxpr(f, return_shape=True)(outer)
    paths = [path for path, _ in sorted(outer.items())]
    wrong = _Uses().walk(closed.jaxpr, {v: p for v, p in zip(closed.jaxpr.invars, paths, strict=True) if p in slices})
    if wrong:
        raise PlanError(
            [
                f"{path}: its rows, named 'vocab', are shared over the stages of `pipe`, and {use} would see one "
                f"stage's slice; use jaxpar.embedding_lookup and jaxpar.cross_entropy, or give the dim the mesh axis "
                f"itself, jaxpar.named(init, P('tensor', None)), and every stage holds it whole"
                for path, use in wrong
            ]
        )


class _Uses:
    """What is done with the slices in a jaxpr."""

    def walk(self, jaxpr: Any, slices: dict[Any, str]) -> list[tuple[str, str]]:
        slices, wrong = dict(slices), []
        for eqn in jaxpr.eqns:
            used = [slices[v] for v in eqn.invars if not hasattr(v, "val") and v in slices]
            marked = eqn.primitive.name == "name" and eqn.params["name"] == _MARK
            if marked and not used:
                wrong.append((f"a table of {eqn.invars[0].aval.shape[0]} rows", "a lookup or a cross-entropy"))
            elif used and (eqn.primitive.name in _HARMLESS or eqn.params.get("name") == TABLE):
                slices[eqn.outvars[0]] = used[0]
            elif not marked and (inner := _called(eqn)) is not None:
                inside = zip(inner.invars, eqn.invars, strict=True)
                wrong += self.walk(inner, {i: slices[v] for i, v in inside if not hasattr(v, "val") and v in slices})
            elif used and not marked:
                wrong += [(path, f"{eqn.primitive.name!r}") for path in used]
        return wrong + [(slices[v], "the result") for v in jaxpr.outvars if not hasattr(v, "val") and v in slices]


def _called(eqn: Any) -> Any:
    """The jaxpr of a plain call with the same arguments, such as `jit` and `checkpoint`."""
    inner = eqn.params.get("jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    called = inner is not None and len(getattr(inner, "invars", ())) == len(eqn.invars)
    return inner if called and eqn.primitive.name in ("jit", "pjit", "checkpoint", "remat", "remat2") else None
