"""How many bytes a train step takes on one device, without compiling it: what XLA allocates, by what it is for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType

from jaxpar.batch import BatchAxes
from jaxpar.estimate.liveness import CPU, CUDA, Platform
from jaxpar.estimate.pieces import Pieces, Shapes, trace_pieces
from jaxpar.estimate.state_memory import COUNTERS, Sizes, StateBytes, batch_bytes, state_bytes, stored
from jaxpar.executor.steered import learned
from jaxpar.mesh import AXES, REPLICA, ROW_AXES
from jaxpar.pipeline.table import Table, lower
from jaxpar.placement import Placement, place
from jaxpar.plan import Plan
from jaxpar.structure import Structure

_ACCUMULATOR = 4  # float32


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device at the peak of a step; together they are `total`, XLA's `StepReport.peak_bytes`.

    Attributes:
      parameters, optimizer: as they lie between steps; what is offloaded is not in it.
      batch: this device's rows and positions, counters and metrics.
      gradients: what they are accumulated in.
      saved: what layers keep between forward and backward, and what goes from stage to stage, in all slots.
      weights: gathered or cast for their use, and gradients on their way.
      working: what the layer, the head or the embedding needs that is at work when the peak is reached.
      phase: which one that is.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    saved: int
    weights: int
    working: int
    phase: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """By name, in the order above."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "phase"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class MemoryModel:
    """Predicts the memory of any plan of one model and optimizer; keeps what plans have in common."""

    structure: Structure
    optimizer: optax.GradientTransformation
    batch_axes: BatchAxes
    _pieces: dict[Any, Pieces] = field(default_factory=dict)
    _states: dict[Any, Any] = field(default_factory=dict)

    def predict(self, plan: Plan, shapes: Shapes, devices_per_node: int = 8, platform: str = "cuda") -> StepMemory:
        """`plan`: legal, its mesh resolved; `shapes`: of one step's global batch; `platform`: as jax names it."""
        sizes = _sizes(plan, devices_per_node)
        mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        placements = place(self.structure, plan, mesh)
        batch = batch_bytes(shapes, self.batch_axes, sizes)
        state = state_bytes(placements, self._opt_state(placements), sizes, "optimizer" in plan.offload, batch)
        table = _table(plan, sizes["pipe"], len(self.structure.stacks))
        pieces = self._traced(plan, shapes, table.schedule.split, CPU if platform == "cpu" else CUDA)
        return _Step(self.structure, plan, sizes, placements, state, table, pieces, platform).memory()

    def _opt_state(self, placements: Mapping[str, Placement]) -> Any:
        own = learned(placements, placements)
        views = {path: jax.ShapeDtypeStruct(p.view_shape, p.info.dtype) for path, p in own.items()}
        key = tuple((path, v.shape) for path, v in views.items())
        if key not in self._states:
            self._states[key] = jax.eval_shape(self.optimizer.init, views)
        return self._states[key]

    def _traced(self, plan: Plan, shapes: Shapes, split: bool, platform: Platform) -> Pieces:
        sizes = plan.shape.sizes
        parts = prod(sizes.get(a, 1) for a in ROW_AXES) * plan.microbatches
        rows = max(1, next(iter(shapes.values())).shape[0] // parts) * sizes["expert"]
        own = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in shapes.items()}
        axes = tuple(sizes[a] for a in ("pipe", "tensor", "seq", "expert"))
        key = (
            axes, split, plan.zero == 3, platform, tuple((n, x.shape) for n, x in own.items()),
            plan.precision, plan.remat,
            plan.param_dtype, plan.attention, plan.ulysses, plan.experts, plan.capacity, plan.expert_kernel,
            plan.expert_exchange, plan.sequence_sharded_norms, "activations" in plan.offload,
        )  # fmt: skip
        if key not in self._pieces:
            self._pieces[key] = trace_pieces(self.structure, self.batch_axes, plan, own, split, platform)
        return self._pieces[key]


def _sizes(plan: Plan, devices_per_node: int) -> Sizes:
    sizes = plan.shape.sizes
    replicas = plan.replicas(devices_per_node)
    if replicas == 1:
        return {a: sizes[a] for a in AXES}
    return {REPLICA: replicas, **{a: sizes[a] for a in AXES}, "data": sizes["data"] // replicas}


def _table(plan: Plan, stages: int, lanes: int) -> Table:
    return _lowered(plan.pipeline, stages, plan.microbatches, plan.virtual_stages, lanes, plan.fill)


@cache
def _lowered(pipeline: str, stages: int, microbatches: int, virtual: int, lanes: int, fill: bool) -> Table:
    plan = Plan(f"pipe={stages}", pipeline=pipeline, microbatches=microbatches, virtual_stages=virtual, fill=fill)
    return lower(plan.schedule(stages, lanes))


@dataclass(frozen=True)
class _Step:
    structure: Structure
    plan: Plan
    sizes: Sizes
    placements: Mapping[str, Placement]
    state: StateBytes
    table: Table
    pieces: Pieces
    platform: str

    def memory(self) -> StepMemory:
        phase, gradients, saved, weights, working = max(
            ((name, *parts) for name, parts in self._phases().items()), key=lambda found: sum(found[1:])
        )
        state = self.state
        return StepMemory(
            state.parameters, state.optimizer - state.on_host, state.batch + COUNTERS, gradients, saved, weights,
            working, phase,
        )  # fmt: skip

    @property
    def _once(self) -> bool:
        """One tick is the whole step: XLA makes accumulators when they are needed."""
        return self.plan.microbatches == 1 and self.sizes["pipe"] == 1

    def _phases(self) -> dict[str, tuple[int, int, int, int]]:
        """By name: gradients, saved, weights, working."""
        inner, outer = (sum(self._accumulator(p) for p in ps) for ps in (self._inner, self._outer))
        turned = sum(self._turned(p) for p in self._inner)
        held, pending = self._held_weights(), self._pending_gradients()
        ring, pieces = self._ring(), self.pieces
        if self._once:
            # Each thing is made when it is needed, and gone after it.
            head = max((self._accumulator(p) for p in self._outer), default=0)
            before, after = (0, turned + held), (inner + head, turned + held + pending)
            end = (inner + head, 0, 0)
        else:
            whole = sum(self._fetched_outer(p) for p in self._outer)
            before = after = (inner + outer, whole + turned + held + pending)
            end = (inner + outer, ring, before[1])
        found = {
            "embedding": (before[0], ring, before[1], pieces.embed),
            "head": (before[0], ring, before[1], pieces.head),
            "embedding's gradient": (*end, pieces.unembed),
            "update": (self._scattered(), 0, 0, self._renewed()),
        }
        for stack, mine in zip(self.structure.stacks, pieces.stacks, strict=True):
            found[f"forward of {stack.name}"] = (before[0], ring, before[1], mine.forward)
            found[f"backward of {stack.name}"] = (after[0], ring, after[1], max(mine.backward, mine.weights))
        return found

    @property
    def _all(self) -> list[Placement]:
        return list(self.placements.values())

    @property
    def _outer(self) -> list[Placement]:
        return [p for p in self.placements.values() if p.info.stack is None]

    @property
    def _inner(self) -> list[Placement]:
        return [p for p in self.placements.values() if p.info.stack is not None]

    def _parts(self, p: Placement, zero: bool) -> int:
        """Into how many parts a parameter's dims are cut on a stage; `zero`: by ZeRO too."""
        axes = [axis for _, axis in p.parts]
        axes += [a for a in p.tensor_spec if a is not None]
        axes += p.zero_axes if zero and p.zero_dim is not None else ()
        return prod(self.sizes.get(a, 1) for a in axes)

    def _accumulator(self, p: Placement) -> int:
        whole = prod(p.local_lead) * prod(p.padded) * _ACCUMULATOR
        return whole // self._parts(p, p.scatters_each_microbatch)

    def _fetched_outer(self, p: Placement) -> int:
        """What is gathered once a step, in float32; the others are read where they lie."""
        if p.gathers or np.dtype(p.info.dtype).itemsize < _ACCUMULATOR:
            return prod(p.padded) * _ACCUMULATOR // self._parts(p, zero=False)
        return 0

    def _turned(self, p: Placement) -> int:
        """XLA for GPU gathers along the first dim: shards of another one are turned once, whole stacks of them."""
        if self.platform == "cpu" or not p.gathers or p.zero_dim is None or prod(p.padded[: p.zero_dim]) == 1:
            return 0
        return prod(p.local_lead) * prod(p.padded) * np.dtype(p.info.dtype).itemsize // self._parts(p, zero=True)

    def _held_weights(self) -> int:
        """A layer's and the next one's, of every stack, that are gathered one layer ahead."""
        return 2 * sum(self._layer(p) for p in self._inner if p.gathers)

    def _pending_gradients(self) -> int:
        """A layer's, of every stack, that are returned one layer behind."""
        return sum(self._layer(p) for p in self._inner if p.scatters_each_microbatch)

    def _layer(self, p: Placement) -> int:
        """Bytes of one layer's parameter, whole but for `tensor`, as it is computed with."""
        return prod(p.padded) * self.plan.compute_dtype.itemsize // self._parts(p, zero=False)

    def _ring(self) -> int:
        sizes = self.table.sizes
        total = (sizes["inputs"] + sizes["cotangents"]) * self.pieces.activation
        for lane, (stack, mine) in enumerate(zip(self.structure.stacks, self.pieces.stacks, strict=True)):
            longest = next(
                p.layers.longest for p in self.placements.values() if p.info.stack == stack.name and p.layers
            )
            total += sizes[f"saved.{lane}"] * longest * (mine.saved - mine.on_host)
            total += sizes.get(f"between.{lane}", 0) * longest * mine.between
        slots = len(self.table.schedule.slots)
        return total + slots * self.pieces.activation

    def _scattered(self) -> int:
        """Gradients as the optimizer is given them."""
        return sum(prod(p.local_lead) * prod(p.padded) * _ACCUMULATOR // self._parts(p, p.scatters) for p in self._all)

    def _renewed(self) -> int:
        """With ZeRO 1 and 2 a new parameter is gathered whole before it takes the old one's place, one at a time."""
        gathered = [p for p in self._all if p.scatters and not p.gathers]
        return max((stored(p, p.param_spec(), p.info.dtype, self.sizes) for p in gathered), default=0)
