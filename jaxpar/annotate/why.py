"""Why a parameter is split as it is, and what another choice would cost."""

from jaxpar.annotate.flat import Value
from jaxpar.annotate.solve import Layout, Solution
from jaxpar.annotate.trace import ROUTE
from jaxpar.annotate.ways import PARTS
from jaxpar.estimate.sizes import size


def why(parameter: int, layout: Layout, solution: Solution, given: bool) -> str:
    """A sentence; sizes are of one layer and device."""
    value, dim = layout.flat.ins[parameter], solution.split[parameter]
    if given:
        return "named so"
    if dim is None:
        return _whole(parameter, value, layout, solution)
    made = "; ".join(dict.fromkeys(_uses(parameter, dim, solution)))
    return f"{made}; otherwise {_otherwise(parameter, layout, solution)}"


def _uses(parameter: int, dim: int, solution: Solution) -> list[str]:
    found = []
    for op, way in solution.chosen:
        mine = [state for value, state in zip(op.ins, way.ins, strict=True) if value.argument == parameter]
        if not any(isinstance(state, int) for state in mine):
            continue
        if op.name == "dot_general":
            found.append("its results are summed" if way.out == PARTS else "its results stay split")
        elif op.name.startswith(ROUTE):
            found.append("experts' features, summed once a layer")
    return found or ["split as what it meets"]


def _whole(parameter: int, value: Value, layout: Layout, solution: Solution) -> str:
    dims = [d for d, n in enumerate(value.shape) if n % layout.tensor == 0 and n]
    if len(value.shape) < 2:
        return "whole: small"
    if not dims:
        return f"whole: no dim of {list(value.shape)} divides by {layout.tensor}"
    others = [layout.solve({parameter: d}) for d in dims]
    possible = [other for other in others if other is not None]
    if not possible:
        return "whole: what it makes would have to be gathered"
    more = min(other.moved for other in possible) - solution.moved
    return (
        f"whole: split, {size(round(more))} more would be sent" if more > 0 else "whole: split, less of others could be"
    )


def _otherwise(parameter: int, layout: Layout, solution: Solution) -> str:
    value, dim = layout.flat.ins[parameter], solution.split[parameter]
    others: list[int | None] = [d for d, n in enumerate(value.shape) if n % layout.tensor == 0 and d != dim]
    best = None
    for other in [None, *others]:
        found = layout.solve({parameter: other})
        if found is not None and (best is None or _rank(layout, found) < _rank(layout, best[1])):
            best = (other, found)
    if best is None:
        return "nothing fits"
    held, sent = _held(layout, best[1]) - _held(layout, solution), best[1].moved - solution.moved
    what = "whole" if best[0] is None else f"dim {best[0]}"
    return f"{what}: {_signed(held)} of parameters held, {_signed(sent)} sent"


def _rank(layout: Layout, solution: Solution) -> tuple[float, float]:
    return _held(layout, solution), solution.moved


def _held(layout: Layout, solution: Solution) -> float:
    parts = (layout.tensor if dim is not None else 1 for dim in solution.split)
    return sum(value.bytes / n for value, n in zip(layout.flat.ins, parts, strict=False))


def _signed(amount: float) -> str:
    return f"{'-' if amount < 0 else '+'}{size(round(abs(amount)))}"
