"""Where no plan is legal or fits: changes of what was asked that give one, and what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.estimate.devices import device, every_kind
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.question import Question
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress, Search
from jaxpar.planner.space import Space

# How many are told.
MOST = 3
# More nodes are tried up to so many times as many.
TIMES = 512


@dataclass(frozen=True)
class WayOut:
    """`change`: what to do. `best`: the plan it gives, on so many `devices`. `numerics`: other numbers."""

    change: str
    best: Candidate
    devices: int
    numerics: bool = False

    @property
    def cost(self) -> float:
        """Device-seconds of a step."""
        return self.devices * self.best.time.total

    def __str__(self) -> str:
        step = f"{self.best.time.total:.3g} s a step on {self.devices} devices, {gigabytes(self.best.peak_bytes)} each"
        return f"{self.change}: {step}, {self.best.plan}" + ("; changes numbers" if self.numerics else "")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        about = {"change": self.change, "devices": self.devices, "device_seconds": self.cost, "numerics": self.numerics}
        return about | self.best.to_dict()


def ways_out(ranked: Ranked, progress: Progress = lambda what, done, of: None, most: int = MOST) -> list[WayOut]:
    """The cheapest changes in device-seconds of a step, those that keep the numbers before those that do not.

    Where fewer single changes than `most` help, also more nodes, with and without one of them.
    """
    q = replace(ranked.question, space=quick(ranked.question.space))
    legal = bool(ranked.near)
    changes = [*_kept(q), *(_more_memory(q) if legal else _other_counts(q)), *_other_numbers(q)]
    found: list[WayOut] = []
    for i, (change, question, numerics) in enumerate(changes):
        progress("ways out", i, len(changes))
        if best := _best(question):
            found.append(WayOut(change, best, question.cluster.size, numerics))
    if len(found) < most and legal:
        found += _more_nodes([("", q, False), *changes])
    progress("ways out", len(changes), len(changes))
    return sorted(found, key=lambda way: (way.numerics, way.cost))[:most]


def quick(space: Space) -> Space:
    """A part of the space in which something fits if anything does, and is nearly as fast."""

    def few(name: str, wanted: tuple) -> tuple:
        return tuple(value for value in getattr(space, name) if value in wanted) or getattr(space, name)[:1]

    return replace(
        space, pipeline=few("pipeline", ("1f1b", "interleaved")), fill=few("fill", (False,)),
        attention=few("attention", ("ring",)), within_node=few("within_node", (False,)), most_virtual_stages=4,
    )  # fmt: skip


def _best(question: Question) -> Candidate | None:
    return next(iter(Search(question).run().found), None)


Change = tuple[str, Question, bool]


def _kept(q: Question) -> Iterator[Change]:
    """What a plan could do that was not tried."""
    for field in ("remat", "zero"):
        everything = getattr(Space(), field)
        if set(everything) - set(getattr(q.space, field)):
            yield f"try every {field}", replace(q, space=replace(q.space, **{field: everything})), False
    for offload in (("optimizer",), ("activations",), ("optimizer", "activations")):
        if q.base.offload != offload and not q.space.offload:
            what = " and ".join(offload)
            yield f"offload {what} to the host", replace(q, space=replace(q.space, offload=(offload,))), False


def _more_memory(q: Question) -> Iterator[Change]:
    """Devices of other kinds that have more."""
    current = q.device
    for kind in every_kind() if q.budget is None else ():
        if device(kind).memory_bytes > current.memory_bytes and device(kind).bf16_flops >= current.bf16_flops:
            yield f"devices with more memory, {kind}", _on(q, kind), False


def _other_counts(q: Question) -> Iterator[Change]:
    """Where no mesh is legal: the most devices of a node with which one is, or rows that divide."""
    each, devices = q.cluster.devices_per_node, q.cluster.size
    for fewer in range(each - 1, 0, -1):
        smaller = _sized(q, q.cluster.nodes, fewer)
        if not q.cluster.more and _best(smaller):
            yield f"use {fewer} of the {each} devices of a node", smaller, False
            break
    if q.rows % devices:
        rows = -(-q.rows // devices) * devices
        shapes = {n: type(x)((rows, *x.shape[1:]), x.dtype) for n, x in q.shapes.items()}
        yield f"{rows} rows a step in place of {q.rows}", replace(q, shapes=shapes), True


def _other_numbers(q: Question) -> Iterator[Change]:
    if q.base.precision == "float32" and not q.space.precision:
        yield "precision bfloat16", replace(q, space=replace(q.space, precision=("bfloat16",))), True
    if q.base.param_dtype == "float32" and not q.space.param_dtype:
        yield "parameters in bfloat16", replace(q, space=replace(q.space, param_dtype=("bfloat16",))), True


def _on(q: Question, kind: str) -> Question:
    parts = [replace(part, kind=kind, custom=None, like="", more=()) for part in q.cluster.parts]
    return replace(q, cluster=replace(parts[0], more=tuple(parts[1:])))


def _sized(q: Question, nodes: int, each: int) -> Question:
    return replace(q, cluster=replace(q.cluster, nodes=nodes, devices_per_node=each))


def _more_nodes(changes: list[Change]) -> Iterator[WayOut]:
    """With each change, the fewest nodes, doubled, on which something fits."""
    for change, q, numerics in changes:
        nodes = 2 * q.cluster.nodes
        while not q.cluster.more and nodes <= TIMES * q.cluster.nodes:
            ranked = Search(_sized(q, nodes, q.cluster.devices_per_node)).run()
            if ranked.found:
                label = f"{nodes} nodes of {q.cluster.devices_per_node}" + (f", and {change}" if change else "")
                yield WayOut(label, ranked.best, ranked.question.cluster.size, numerics)
            if ranked.found or not ranked.near:  # more nodes would be more than a step's rows
                break
            nodes *= 2
