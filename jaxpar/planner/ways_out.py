"""Where no plan is legal or fits: single changes of what was asked that give one, and what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import device, every_kind
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.question import Question
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress, Search
from jaxpar.planner.space import Space

# How many are told.
MOST = 3
# More nodes are tried up to so many times as many.
TIMES = 1024


@dataclass(frozen=True)
class WayOut:
    """`change`: what to do. `cost`: device-seconds of a step in the best plan it gives; `devices`: of its cluster.
    `numerics`: whether it changes what is computed."""

    change: str
    best: Candidate
    devices: int
    numerics: bool = False

    @property
    def cost(self) -> float:
        return self.devices * self.best.time.total

    def __str__(self) -> str:
        step = f"{self.best.time.total:.3g} s a step on {self.devices} devices, {gigabytes(self.best.peak_bytes)} each"
        return f"{self.change}: {step} ({self.best.plan})" + (", other numbers" if self.numerics else "")

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, "devices": self.devices, "numerics": self.numerics} | self.best.to_dict()


def ways_out(ranked: Ranked, progress: Progress = lambda what, done, of: None, most: int = MOST) -> list[WayOut]:
    """The cheapest changes in device-seconds of a step, those that keep the numbers before those that do not."""
    changes = list(_changes(ranked.question))
    found: list[WayOut] = []
    for i, (change, question, numerics) in enumerate(changes):
        progress("ways out", i, len(changes))
        if best := _best(question):
            found.append(WayOut(change, best, question.cluster.size, numerics))
    if not any(way.change.startswith("more nodes") for way in found):
        found += _more_nodes(ranked.question)
    progress("ways out", len(changes), len(changes))
    return sorted(found, key=lambda way: (way.numerics, way.cost))[:most]


def _best(question: Question) -> Candidate | None:
    return next(iter(Search(question).run().found), None)


def _changes(q: Question) -> Iterator[tuple[str, Question, bool]]:
    space, everything = q.space, Space()
    for field, how in (("remat", "recompute"), ("zero", "shard"), ("pipeline", "other schedules")):
        if set(getattr(everything, field)) - set(getattr(space, field)):
            freed = replace(space, **{field: getattr(everything, field)})
            yield f"{how}: free {field}", replace(q, space=freed), False
    for offload in (("optimizer",), ("activations",), ("optimizer", "activations")):
        if q.base.offload != offload:
            yield (
                f"{' and '.join(offload)} in the host's memory: offload={offload}",
                replace(q, space=replace(space, offload=(offload,))), False,
            )  # fmt: skip
    yield from _other_rows(q)
    for kind in every_kind():
        if device(kind).memory_bytes > q.device.memory_bytes and device(kind).bf16_flops >= q.device.bf16_flops:
            yield f"devices with more memory: {kind}", _on(q, kind), False
    if q.base.precision == "float32" and not space.precision:
        yield "precision=bfloat16", replace(q, space=replace(space, precision=("bfloat16",))), True
    if q.base.param_dtype == "float32" and not space.param_dtype:
        yield (
            "parameters in bfloat16: param_dtype=bfloat16",
            replace(q, space=replace(space, param_dtype=("bfloat16",))),
            True,
        )


def _on(q: Question, kind: str) -> Question:
    parts = [replace(part, kind=kind, custom=None, more=()) for part in q.cluster.parts]
    return replace(q, cluster=replace(parts[0], more=tuple(parts[1:])), budget=None)


def _other_rows(q: Question) -> Iterator[tuple[str, Question, bool]]:
    """Where rows do not divide, the nearest count that does."""
    devices = q.cluster.size
    if q.rows % devices:
        rows = -(-q.rows // devices) * devices
        shapes = {n: type(x)((rows, *x.shape[1:]), x.dtype) for n, x in q.shapes.items()}
        yield f"{rows} rows a step in place of {q.rows}", replace(q, shapes=shapes), True


def _more_nodes(q: Question) -> list[WayOut]:
    """The fewest nodes, doubled, on which something fits."""
    if q.cluster.more:
        return []
    nodes = q.cluster.nodes
    while (nodes := nodes * 2) <= TIMES * q.cluster.nodes:
        question = replace(q, cluster=replace(q.cluster, nodes=nodes))
        try:
            best = _best(question)
        except ConfigError:
            return []
        if best:
            return [WayOut(f"more nodes: {nodes} of {q.cluster.devices_per_node} devices", best, question.cluster.size)]
    return []
