"""What a step spends on gradients, sharded parameters and the optimizer, beyond what compute hides."""

from dataclasses import dataclass, replace

from jaxpar.estimate.layer_time import LayerTime
from jaxpar.estimate.layout import Layout
from jaxpar.estimate.links import Group, Links
from jaxpar.estimate.matmul import Rates
from jaxpar.estimate.system import System
from jaxpar.estimate.work import Work

# Adam in float32: the parameter, two moments and the gradient are read, the first three written, and a copy in 16 bits.
ADAM_BYTES = 30


@dataclass(frozen=True)
class DataTime:
    """Seconds of a step: `exposed` communication, and what the hidden part costs compute (`contention`)."""

    exposed: float
    contention: float


@dataclass(frozen=True)
class Held:
    """Parameters of one device before ZeRO: of its layers, of the experts in them, and outside them."""

    dense: float
    experts: float
    outer: float

    @classmethod
    def by(cls, work: Work, layout: Layout) -> "Held":
        dense = sum(layer.dense_parameters * n for layer, n in work.layers)
        experts = sum(layer.expert_parameters * n for layer, n in work.layers)
        return cls(
            dense / (layout.pipe * layout.tensor),
            experts / (layout.pipe * layout.expert * layout.expert_tensor),
            work.outer_parameters / layout.tensor,
        )


def data_time(work: Work, layout: Layout, system: System, links: Links, group: Group, layer: LayerTime) -> DataTime:
    """`group`: all replicas of a dense parameter, `data` and `seq`; `layer`: of a microbatch."""
    held = Held.by(work, layout)
    if group.size == 1:
        return DataTime(0.0, 0.0)
    if layout.zero >= 2:
        return _sharded(work, layout, system, links, group, layer, held)
    return _once(work, layout, system, links, group, layer, held)


def _once(
    work: Work, layout: Layout, system: System, links: Links, group: Group, layer: LayerTime, held: Held
) -> DataTime:
    """Gradients are summed at the end of a step. ZeRO-1 scatters them, and gathers what the optimizer made of its
    shards. Hidden: what fits behind the last microbatch's backward, and behind the next step's first forward; where
    chunks take turns, as many microbatches as there are stages pass through one chunk before the next."""
    outer = held.outer if layout.pipe == 1 else held.outer / 2
    fewer = replace(group, size=max(1, group.size // layout.expert), inside=max(1, group.inside // layout.expert))
    if layout.zero == 0:
        reduce = links.reduce((held.dense + outer) * system.reduce_bytes, group)
        reduce += links.reduce(held.experts * system.reduce_bytes, fewer)
        gather = 0.0
    else:
        reduce = links.gather((held.dense + outer) * system.reduce_bytes, group)
        reduce += links.gather(held.experts * system.reduce_bytes, fewer)
        gather = links.gather((held.dense + outer) * system.update_bytes, group)
        gather += links.gather(held.experts * system.update_bytes, fewer)
    if not system.overlap_gradients:
        return DataTime(reduce + gather, 0.0)
    mine = work.depth / layout.pipe
    over = mine * (min(layout.pipe, layout.microbatches) if layout.chunks > 1 else 1)
    return _hidden(links, ((reduce, over * layer.all_backward), (gather, over * layer.all_forward)), 1, mine)


def _sharded(
    work: Work, layout: Layout, system: System, links: Links, group: Group, layer: LayerTime, held: Held
) -> DataTime:
    """Every microbatch scatters its gradients, and with ZeRO-3 gathers parameters for its forward and again for its
    backward. Hidden: what fits behind the layers' compute, but for the first gather and the last scatter. ZeRO-2
    gathers what the optimizer made of its shards, once and after it."""
    seq = group.size // layout.data
    shard = max(1, min(group.size, layout.shard * seq))
    inner = Group(shard, min(shard, group.inside))
    copies = group.size // shard
    outer = 0.0 if system.gather_outer_once else held.outer
    sizes = held.dense + held.experts + outer
    layers = max(1.0, work.depth / layout.pipe)
    gather = layers * links.gather(sizes / layers * system.gather_bytes, inner)
    scatter = layers * links.gather(sizes / layers * system.reduce_bytes, inner)
    forward, backward = layers * layer.all_forward, layers * layer.all_backward
    rest = 0.0
    if layout.zero == 2:
        rest, gather = links.gather((held.dense + held.experts + held.outer) * system.update_bytes, inner), 0.0
    again = gather if system.regather else 0.0
    # In lockstep, stages that wait move all the same.
    times = layout.microbatches + (layout.pipe - 1 if system.lockstep else 0)
    hidden = _hidden(links, ((gather, forward), (scatter + again, backward)), times, layers)
    if system.gather_outer_once:
        rest += links.gather(held.outer * system.gather_bytes, inner) if layout.zero == 3 else 0.0
        rest += links.gather(held.outer * system.reduce_bytes, inner)
    if copies > 1:
        across = Group(copies, max(1, group.inside // inner.inside))
        rest += links.reduce(sizes / shard * system.reduce_bytes, across)
    if not system.overlap_shards:
        return DataTime(times * (gather + again + scatter) + rest, 0.0)
    return DataTime(hidden.exposed + rest, hidden.contention)


def _hidden(links: Links, pairs: tuple[tuple[float, float], ...], times: int, layers: float) -> DataTime:
    """`pairs`: communication, and the compute it may lie over, `times` times in a step; one layer's share of each kind
    of communication in a step has nothing to lie over."""
    exposed = sum(times * max(0.0, moved - compute) for moved, compute in pairs)
    ends = sum(moved for moved, _ in pairs) / max(1.0, layers)
    over = sum(times * min(moved, compute) for moved, compute in pairs)
    return DataTime(exposed + ends, links.constants.contention * over)


def accumulate_time(work: Work, layout: Layout, system: System, rates: Rates) -> float:
    """Every microbatch but the first adds its gradients to a sum, limited by memory. ZeRO 2 and 3 sum their shards."""
    held = Held.by(work, layout)
    parameters = held.dense + held.experts + held.outer / layout.pipe
    if layout.zero >= 2:
        parameters /= layout.shard
    return (layout.microbatches - 1) * rates.moved(parameters * system.accumulate_bytes)


def optimizer_time(work: Work, layout: Layout, rates: Rates) -> float:
    """Adam on this device's shard, limited by memory."""
    held = Held.by(work, layout)
    shards = layout.shard if layout.zero else 1
    parameters = (held.dense + held.outer / layout.pipe) / shards + held.experts / max(1, shards // layout.expert)
    return rates.moved(parameters * ADAM_BYTES)
