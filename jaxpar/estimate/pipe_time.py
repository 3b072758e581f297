"""How long the stages of a pipeline take for a step's microbatches, and for how much of that they wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from jaxpar.estimate.layer_time import LayerTime
from jaxpar.estimate.layout import Layout
from jaxpar.pipeline import Costs, Kind, build, from_table

# How often the slots of a schedule have tasks of these kinds on some stage: a slot lasts as long as its longest task.
Slots = dict[frozenset[Kind], int]


@dataclass(frozen=True)
class PipeTime:
    """Seconds of a step. `total`: of the layers, embedding and head. `work`: of that, what a device computes on
    average. `in_flight`: chunks of layers whose activations the fullest stage holds at once."""

    total: float
    work: float
    in_flight: int


def independent(layout: Layout, stacks: Sequence[int], layer: LayerTime, head: float) -> PipeTime:
    """Stages that go on as soon as their input is there: all microbatches through the slowest stage, and once through
    the others (their chunks in turns: Narayanan et al., 2021)."""
    depth = sum(stacks)
    seconds = layer.all_forward + layer.all_backward
    stages = _stages(layout, depth, seconds, head)
    slowest, everything = max(stages), depth * seconds + head
    total = layout.microbatches * slowest + (sum(stages) - slowest) / layout.chunks
    p, v = layout.pipe, layout.chunks
    ahead = p if v == 1 else (p * (v + 1) - 1)
    in_flight = min(layout.microbatches * v, ahead)
    return PipeTime(total, layout.microbatches * everything / p, in_flight)


def _stages(layout: Layout, depth: int, layer: float, head: float) -> list[float]:
    """Seconds of each stage for one microbatch. Where layers do not divide, the last stage has what is left."""
    p = layout.pipe
    if p == 1:
        return [depth * layer + head]
    if layout.ends_are_layers:
        full = (depth + 2) / p
        return [(full - 1) * layer, *[full * layer] * (p - 2), (full - 1) * layer + head]
    full = ceil(depth / p)
    stages = [full * layer if (i + 1) * full <= depth else max(0, depth - i * full) * layer for i in range(p)]
    stages[-1] += head
    return stages


def lockstep(layout: Layout, stacks: Sequence[int], layer: LayerTime, head: float) -> PipeTime:
    """Stages that play a schedule tick by tick and share the head: the time is that of the schedule, by its own
    slots. `stacks`: layers of each, which a stage pads to as many of each stack as the longest has."""
    p, m = layout.pipe, layout.microbatches
    v = 2 if layout.schedule == "zero_bubble_v" and p > 1 else layout.chunks
    name, chunks, fill = (layout.schedule, layout.chunks, layout.fill) if p > 1 else ("1f1b", 1, False)
    slots, in_flight = schedule_slots(name, p, m, chunks, fill)
    depth, layers = sum(stacks), sum(ceil(n / (p * v)) for n in stacks) * v
    costs = Costs(layers * layer.all_forward, layers * (layer.all_backward - layer.weight), layers * layer.weight)
    split = any(Kind.W in kinds for kinds in slots)
    seconds = sum(n * max(costs.of(kind, split) for kind in kinds) for kinds, n in slots.items()) / v
    work = m * (depth / p * (layer.all_forward + layer.all_backward) + head / p)
    return PipeTime(seconds + m * head / p, work, in_flight)


def schedule_slots(name: str, stages: int, microbatches: int, chunks: int, fill: bool) -> tuple[Slots, int]:
    """Of the schedule `build` makes, how many slots have which kinds of task, and the most chunks in flight.

    `name`: also a clock table as text. A long schedule only repeats its middle: it is counted from two short ones, and
    one of many stages from some of few. Raises `PlanError` as `build` does.
    """
    if stages > _FEW and microbatches >= (2 if fill else 1) * stages and "|" not in name:
        return _extended(name, stages, microbatches, chunks, fill)
    short = 2 * stages + microbatches % stages
    if microbatches <= short + stages or "|" in name:
        return _counted(name, stages, microbatches, chunks, fill)
    near, in_flight = _counted(name, stages, short, chunks, fill)
    far, further = _counted(name, stages, short + stages, chunks, fill)
    repeats = (microbatches - short) // stages
    slots = {kinds: n + (repeats - 1) * (n - near.get(kinds, 0)) for kinds, n in far.items()}
    return slots, in_flight + repeats * (further - in_flight)


# Schedules of more stages are counted from those of so many, and of half as many.
_FEW = 8


def _extended(name: str, stages: int, microbatches: int, chunks: int, fill: bool) -> tuple[Slots, int]:
    """From p microbatches on (2 p with `fill`) the slots of each kind grow evenly with stages and with microbatches.

    The chunks in flight are those of whole groups of p microbatches, and more where interleaved groups are larger.
    """
    half, full = _FEW // 2, _FEW
    few, many, longer = (
        _counted(name, *sizes, chunks, fill) for sizes in ((half, full), (full, 2 * full), (half, 3 * half))
    )

    def extended(low: int, high: int, more: int) -> int:
        by_stage, by_microbatch = (high - low) / (full - half), (more - low) / half
        return int(low + by_stage * (stages - half) + by_microbatch * (microbatches - 2 * stages))

    slots = {kinds: extended(n, many[0].get(kinds, 0), longer[0].get(kinds, 0)) for kinds, n in few[0].items()}
    groups, left = divmod(microbatches, stages)
    in_flight = extended(few[1], many[1], longer[1])
    if name == "interleaved":
        in_flight += (chunks - 1) * ceil(left / groups)
    return slots, min(in_flight, microbatches * (2 if name == "zero_bubble_v" else chunks))


@lru_cache(maxsize=4096)
def _counted(name: str, stages: int, microbatches: int, chunks: int, fill: bool) -> tuple[Slots, int]:
    own = from_table(name) if "|" in name else None
    schedule = own or build(name, stages, microbatches, chunks, fill=fill)
    kinds: dict[tuple[int, int], set[Kind]] = {}
    for tick, _, slot, task in schedule.entries():
        kinds.setdefault((tick, slot), set()).add(task.kind)
    counts: Slots = {}
    for found in kinds.values():
        key = frozenset(found)
        counts[key] = counts.get(key, 0) + 1
    return counts, max(schedule.peak_live())
