"""A jaxpar model as the estimator's `Work`, read off the shapes and names of its parameters."""

from math import prod

from jaxpar.errors import ModelError
from jaxpar.estimate.work import Layer, Matmul, Work
from jaxpar.structure import ParamInfo, Structure

_HEADS = ("heads", "kv_heads")


def work_of(structure: Structure, experts_per_token: int | None = None) -> Work:
    """What a model has to compute. A matrix is one that `named` gave two sides; `tensor` cuts it as the axis rules do.

    Raises ModelError for experts without `experts_per_token`.
    """
    layers = tuple((_layer(structure, stack.name, experts_per_token), stack.length) for stack in structure.stacks)
    outer = [info for info in structure.params.values() if info.stack is None]
    return Work(layers, layers[0][0].hidden, structure.vocab_size or 0, sum(prod(info.shape) for info in outer))


def _layer(structure: Structure, stack: str, active: int | None) -> Layer:
    infos = [info for info in structure.params.values() if info.stack == stack]
    dense = _matmuls([info for info in infos if "experts" not in info.names])
    experts = _matmuls([info for info in infos if "experts" in info.names])
    if experts and active is None:
        raise ModelError(f"{stack} has experts: say how many of them a token goes to (experts_per_token)")
    wide = [m for m in (*dense, *experts) if m.role == "up"]
    inner = sum(m.n for m in dense if m.role == "up") + (active or 0) * sum(m.n for m in experts if m.role == "up")
    sizes = {name: _size(infos, name) for name in ("embed", "heads", "kv_heads", "head_dim", "experts")}
    return Layer(
        dense,
        hidden=sizes["embed"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"] or sizes["heads"],
        head_dim=sizes["head_dim"],
        inner=inner,
        gated=any(m.count > 1 for m in wide),
        experts=sizes["experts"],
        active=active or 0,
        expert_matmuls=experts,
    )


def _matmuls(infos: list[ParamInfo]) -> tuple[Matmul, ...]:
    """Alike ones counted; of three projections of as many heads, two are those of keys and values."""
    counts: dict[Matmul, int] = {}
    for info in infos:
        if (found := _matmul(info)) is not None:
            counts[found] = counts.get(found, 0) + 1
    alike = []
    for matmul, n in counts.items():
        keys = 2 if matmul.role == "query" and n == 3 else 0
        alike.append(Matmul(matmul.role, matmul.k, matmul.n, matmul.split, n - keys))
        if keys:
            alike.append(Matmul("key", matmul.k, matmul.n, matmul.split, keys))
    return tuple(alike)


def _matmul(info: ParamInfo) -> Matmul | None:
    """None for what is no matrix: heads and their features are one side, which expert is none."""
    sides: list[tuple[str, int]] = []
    for name, size in zip(info.names, info.dims, strict=True):
        if name == "head_dim" and sides and sides[-1][0] in _HEADS:
            sides[-1] = (sides[-1][0], sides[-1][1] * size)
        elif name != "experts":
            sides.append((name or "", size))
    if len(sides) != 2:
        return None
    (into, k), (out, n) = sides
    roles = {"heads": ("query", "out"), "kv_heads": ("key", "other"), "mlp": ("up", "down")}
    if out in roles:
        return Matmul(roles[out][0], k, n, "n")
    return Matmul(roles[into][1], k, n, "k") if into in roles else Matmul("other", k, n, None)


def _size(infos: list[ParamInfo], name: str) -> int:
    return max((n for i in infos for axis, n in zip(i.names, i.dims, strict=True) if axis == name), default=0)
