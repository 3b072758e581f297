"""What a search may change of a plan, and the plans that this spans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jaxpar.errors import ConfigError, PlanError
from jaxpar.mesh import AXES, MeshShape
from jaxpar.plan import Attention, Offload, ParamDtype, Plan, Precision


@dataclass(frozen=True)
class Space:
    """What is searched, besides what a base plan says. Nothing here changes what is computed, unless it is freed.

    Attributes:
      data, pipe, tensor, seq, expert: sizes to try; (): all that multiply to the devices.
      zero, within_node: stages of ZeRO, and whether shards stay in a node.
      microbatches: counts to try; (): all that divide the rows of a step.
      pipeline: schedules, of those with more than one stage. `gpipe` is left out: 1f1b is as fast and holds less.
      virtual_stages: of `interleaved`; (): all up to `most_virtual_stages` that leave no stage more layers than one
        chunk would.
      fill: of the zero-bubble schedules.
      attention: where `seq` > 1.
      remat: policies, `named:...` too; what names `attention` or `qkv` is not tried for models without attention.
      split_norms: norms are split over `tensor` wherever positions divide: that moves as much and holds less. Else as
        in the base plan.
      precision, param_dtype, reduce_dtype: they change numbers; (): as in the base plan.
      offload: what may wait in the host's memory; (): as in the base plan.
    """

    data: tuple[int, ...] = ()
    pipe: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    seq: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    within_node: tuple[bool, ...] = (False, True)
    microbatches: tuple[int, ...] = ()
    pipeline: tuple[str, ...] = ("1f1b", "interleaved", "zero_bubble", "zero_bubble_v")
    virtual_stages: tuple[int, ...] = ()
    most_virtual_stages: int = 8
    fill: tuple[bool, ...] = (False, True)
    attention: tuple[Attention, ...] = ("ring", "ulysses", "allgather")
    remat: tuple[str, ...] = ("none", "dots", "named:attention,qkv", "named:attention", "full")
    split_norms: bool = True
    precision: tuple[Precision, ...] = ()
    param_dtype: tuple[ParamDtype, ...] = ()
    reduce_dtype: tuple[ParamDtype, ...] = ()
    offload: tuple[tuple[Offload, ...], ...] = ()

    def __post_init__(self) -> None:
        wrong = [f"{axis}={sizes}" for axis in AXES if min(sizes := getattr(self, axis), default=1) < 1]
        wrong += [f"{name}=()" for name in ("zero", "within_node", "pipeline", "fill", "attention", "remat")
                  if not getattr(self, name)]  # fmt: skip
        if wrong:
            raise ConfigError(f"the space to search has nothing, or no positive sizes, in {', '.join(wrong)}")


@dataclass(frozen=True)
class Sizes:
    """Of the model and the step, what bounds a space. `layers`: of each stack; `experts`, `heads`: 0 for none."""

    devices: int
    rows: int
    length: int
    layers: tuple[int, ...]
    experts: int
    heads: int


def meshes(space: Space, sizes: Sizes) -> Iterator[MeshShape]:
    """Every mesh of all devices. `expert` stays 1 for a model without any: there it is `data` by another name."""
    allowed = {axis: getattr(space, axis) or divisors(sizes.devices) for axis in AXES}
    if not sizes.experts and not space.expert:
        allowed["expert"] = (1,)
    for pipe, tensor, seq, expert in product(*(allowed[axis] for axis in ("pipe", "tensor", "seq", "expert"))):
        data, left = divmod(sizes.devices, pipe * tensor * seq * expert)
        if not left and data in allowed["data"]:
            yield MeshShape(data, pipe, tensor, seq, expert)


def trunks(space: Space, base: Plan, sizes: Sizes, shape: MeshShape) -> Iterator[Plan | PlanError]:
    """On one mesh, plans that differ in more than what `variants` changes, or why one cannot even be said. They have
    no ZeRO and recompute nothing."""
    replicas = shape.data * shape.expert
    counts = space.microbatches or divisors(max(1, sizes.rows // replicas))
    attentions = space.attention if shape.seq > 1 else (base.attention,)
    split = space.split_norms and shape.tensor > 1 and sizes.length % (shape.tensor * 2 * shape.seq) == 0
    mesh = str(shape)
    common: dict[str, Any] = dict(
        mesh=mesh, zero=0, within_node=False, remat="none", stage_layers=None,
        sequence_sharded_norms=split or (base.sequence_sharded_norms and not space.split_norms),
    )  # fmt: skip
    for precision, attention in product(space.precision or (base.precision,), attentions):
        # A hybrid is only of its own mesh.
        ulysses = base.ulysses if attention == "ring" and shape.seq % base.ulysses == 0 else 1
        for pipeline, virtual, fill in _pipelines(space, sizes, shape.pipe):
            for microbatches in counts:
                try:
                    yield replace(
                        base, microbatches=microbatches, pipeline=pipeline, virtual_stages=virtual, fill=fill,
                        precision=precision, attention=attention, ulysses=ulysses, **common,
                    )  # fmt: skip
                except PlanError as error:
                    yield error


def _pipelines(space: Space, sizes: Sizes, stages: int) -> Iterator[tuple[str, int, bool]]:
    if stages == 1:
        yield "1f1b", 1, False
        return
    for name in space.pipeline:
        chunks = _virtual(space, sizes, stages) if name == "interleaved" else (1,)
        fills = space.fill if name.startswith("zero_bubble") else (False,)
        for virtual, fill in product(chunks, fills):
            yield name, virtual, fill


def _virtual(space: Space, sizes: Sizes, stages: int) -> Sequence[int]:
    if space.virtual_stages:
        return space.virtual_stages

    def longest(chunks: int) -> int:
        return sum(-(-layers // (stages * chunks)) * chunks for layers in sizes.layers)

    most = min(space.most_virtual_stages, min(sizes.layers) // stages)
    return [v for v in range(2, most + 1) if longest(v) <= longest(1)]


@dataclass(frozen=True)
class Variant:
    """What a plan may change without becoming illegal, and without another schedule."""

    zero: int
    within_node: bool
    remat: str
    param_dtype: ParamDtype
    reduce_dtype: ParamDtype
    offload: tuple[Offload, ...]

    def of(self, trunk: Plan) -> Plan:
        return replace(trunk, **vars(self))


def variants(space: Space, base: Plan, sizes: Sizes, shards: int, replicas: int) -> list[Variant]:
    """`shards`: devices that ZeRO can shard over; `replicas`: groups of them, if they lie within nodes."""
    attends = {"attention", "qkv"}
    remat = [p for p in space.remat if sizes.heads or attends.isdisjoint(Plan(remat=p).saved_names)] or ["full"]
    zeros = space.zero if shards > 1 else (0,) if 0 in space.zero else space.zero[:1]
    found = product(
        zeros,
        [within for within in space.within_node if not within or replicas > 1],
        remat,
        space.param_dtype or (base.param_dtype,),
        space.reduce_dtype or (base.reduce_dtype,),
        space.offload or (base.offload,),
    )
    return [Variant(*values) for values in found if values[0] or not values[1]]


def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
