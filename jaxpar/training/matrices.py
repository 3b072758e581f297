"""Which parameters are matrices, told by their logical names: what decays, and what Muon turns orthogonal.

Never by the rank of an array: a bias over `[heads, head_dim]` has two dims and is a vector, and a stack's layers stand
in front of every shape. Dims are grouped into spaces; `head_dim` is one space with the `heads` or `kv_heads` before it,
and every other dim, named or not, is a space of its own. `experts` in front of the others counts matrices, and is none
of their dims.

| parameter | spaces | |
|---|---|---|
| `[embed]` norm, `[mlp]` or `[heads, head_dim]` bias | 1 | a vector |
| `[embed, heads, head_dim]`, `[heads, head_dim, embed]`, `[experts, embed, mlp]` | 2 | a matrix, inputs first |
| `[vocab, embed]`, `[positions, embed]` | 2 | a table: it decays, and is no linear map of features |
| more | | decays; which dims are inputs is not known |
"""

from dataclasses import dataclass

from jaxpar.axis_rules import Names
from jaxpar.structure import ParamInfo

TABLES = frozenset({"vocab", "positions"})
_HEADS = ("heads", "kv_heads")


@dataclass(frozen=True)
class MatrixDims:
    """The input and the output dims of a linear map, counted without the layer dim."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def decays(info: ParamInfo) -> bool:
    """Whether weight decay is meant for it: matrices and tables, not scales and biases."""
    return len(_spaces(info.names)) >= 2


def matrix_dims(info: ParamInfo) -> MatrixDims | None:
    """The dims of a linear map between features; None for vectors, tables, and what has more than two spaces."""
    spaces = _spaces(info.names)
    if len(spaces) != 2 or TABLES & set(info.names):
        return None
    return MatrixDims(*spaces)


def _spaces(names: Names) -> list[tuple[int, ...]]:
    spaces: list[tuple[int, ...]] = []
    for dim, name in enumerate(names):
        if dim == 0 and name == "experts" and len(names) > 1:
            continue
        if name == "head_dim" and dim > 0 and names[dim - 1] in _HEADS:
            spaces[-1] = (*spaces[-1], dim)
        else:
            spaces.append((dim,))
    return spaces
