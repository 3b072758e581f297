"""The plan: how a model is spread over a mesh. A value: frozen, printable, comparable, to and from a dict."""

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jaxpar.axis_rules import DEFAULT_RULES, NORM_POSITIONS, AxisRules
from jaxpar.errors import PlanError
from jaxpar.mesh import MeshShape
from jaxpar.pipeline import SCHEDULES, Schedule, build, check, forward, from_table
from jaxpar.pipeline.layers import StageLayers, route, stage_layers

Precision = Literal["float32", "bfloat16", "fp8"]
ParamDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]
Attention = Literal["ring", "ulysses", "allgather"]
Experts = Literal["dropless", "capacity"]
ExpertKernel = Literal["loop", "pallas"]
ExpertExchange = Literal["padded", "ragged"]
Offload = Literal["optimizer", "activations"]

# In front of the names that a layer saves, with commas between them.
NAMED = "named:"


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage, and where its shards lie: over all of `data`, or within each node and replicated across nodes."""

    stage: int
    within_node: bool = False


@dataclass(frozen=True)
class Dropless:
    """Every token goes to all its experts; `kernel` sets `expert_kernel` of the plan, `exchange` `expert_exchange`."""

    kernel: ExpertKernel = "loop"
    exchange: ExpertExchange = "padded"


@dataclass(frozen=True)
class Capacity:
    """Experts take at most `factor` times an equal share of a device's pairs (token, expert); the rest is dropped."""

    factor: float
    kernel: ExpertKernel = "loop"
    exchange: ExpertExchange = "padded"


@dataclass(frozen=True)
class Hybrid:
    """Attention by Ulysses among `ulysses` neighbours on `seq`, and by a ring of such groups."""

    ulysses: int


@dataclass(frozen=True)
class Pipeline:
    """A schedule and how layers are cut for it, see the fields of `Plan` of the same names."""

    schedule: str | Schedule
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    fill: bool = False


@dataclass(frozen=True)
class Plan:
    """How one model is trained on one mesh. Wrong values raise `PlanError` at once, all of them together.

    Attributes:
      mesh: sizes of the axes `data, pipe, tensor, seq, expert`; -1 is what is left, axes not named have size 1.
      zero: 0 replicates everything over `data`; 1 shards optimizer state, 2 gradients too, 3 parameters too
        (Rajbhandari et al., ZeRO, 2020; 3 is FSDP). `Zero(3, within_node=True)` sets the next field too.
      within_node: ZeRO shards lie within a node and are replicated across nodes (HSDP).
      microbatches: per step and replica; the rows of a step are worked through in this many parts.
      sequence_sharded_norms: norms and residuals between tensor-parallel matmuls hold 1/tensor of the positions
        (Korthikanti et al., 2022).
      precision: dtype of the layers' compute. `fp8` is bfloat16 with the layers' matmuls of weights in float8 (see
        `docs/optimizers.md`); embedding and head have none of it.
      reduce_dtype: what gradients are summed in over devices, whatever `precision` is; `bfloat16` moves half the
        bytes. Over microbatches they are summed in float32.
      param_dtype: what parameters are stored in between steps. Under bfloat16 use an optimizer that does not round
        small updates away: `OptimizerConfig.low_precision`, or the wrappers of `jaxpar.training.low_precision`.
      pipeline: the schedule that the stages of `pipe` play: see `jaxpar.pipeline.SCHEDULES` and docs/pipelines.md.
        `Pipeline("interleaved", virtual_stages=2)` sets the next fields too. A `Schedule` of one's own, or its clock
        table as text (see `jaxpar.pipeline.from_table`), is played as it stands; it has one stack and is no V.
      virtual_stages: chunks of layers on each stage.
      stage_layers: how many layers each chunk has, in the order of the layers; None: as even as whole layers go.
      fill: zero-bubble schedules play weights' gradients where a stage would wait.
      attention: how positions split over `seq` attend to each other: `ring` sends keys round, `ulysses` trades
        positions for heads, `allgather` gathers keys. `Hybrid(ulysses=2)`, Ulysses inside a ring, sets the next field.
      experts: `dropless` routes every token to all its experts; `Capacity(1.25)` drops by rule, and sets `capacity`.
      capacity: how many times its equal share an expert takes.
      expert_kernel: how experts multiply: `loop` is plain JAX, for every device and dtype; `pallas`, which
        `Dropless(kernel="pallas")` and `Capacity(1.25, kernel="pallas")` set, kernels for Hopper in bfloat16.
      expert_exchange: what `expert` moves: `padded`, buffers with room for 1.25 times an even choice, on every
        backend; `ragged`, which `Dropless(exchange="ragged")` sets, what is filled of them alone, on GPUs.
      ulysses: how many neighbours on `seq` trade positions for heads inside a ring.
      remat: what a layer saves for its backward: `none` recomputes nothing, `dots` keeps matmul results, `full` keeps
        the layer's input alone, `named:attention,mlp` the input and what the model calls so: its own `jaxpar.save`,
        and of `ctx.attend` what goes in, `qkv`, and its result, `attention`.
      offload: what waits in the host's pinned memory while the device does not need it: `optimizer`, the optimizer's
        state between updates (averages of the parameters too), `activations`, what layers save for their backward.
    """

    mesh: str = "data=-1"
    zero: int = 0
    within_node: bool = False
    microbatches: int = 1
    sequence_sharded_norms: bool = False
    precision: Precision = "float32"
    param_dtype: ParamDtype = "float32"
    remat: Remat | str = "none"
    pipeline: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    fill: bool = False
    attention: Attention = "ring"
    ulysses: int = 1
    experts: Experts = "dropless"
    capacity: float | None = None
    reduce_dtype: ParamDtype = "float32"
    offload: tuple[Offload, ...] = ()
    expert_kernel: ExpertKernel = "loop"
    expert_exchange: ExpertExchange = "padded"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", str(MeshShape.parse(self.mesh)))
        if isinstance(self.zero, Zero):
            object.__setattr__(self, "within_node", self.zero.within_node)
            object.__setattr__(self, "zero", self.zero.stage)
        if isinstance(self.offload, list):  # as JSON gives it back
            object.__setattr__(self, "offload", tuple(self.offload))
        if isinstance(self.experts, (Capacity, Dropless)):
            object.__setattr__(self, "expert_kernel", self.experts.kernel)
            object.__setattr__(self, "expert_exchange", self.experts.exchange)
        if isinstance(self.experts, Dropless):
            object.__setattr__(self, "experts", "dropless")
        if isinstance(self.experts, Capacity):
            object.__setattr__(self, "capacity", self.experts.factor)
            object.__setattr__(self, "experts", "capacity")
        if isinstance(self.attention, Hybrid):
            object.__setattr__(self, "ulysses", self.attention.ulysses)
            object.__setattr__(self, "attention", "ring")
        if isinstance(self.pipeline, Pipeline):
            for name in ("virtual_stages", "stage_layers", "fill"):
                object.__setattr__(self, name, getattr(self.pipeline, name))
            object.__setattr__(self, "pipeline", self.pipeline.schedule)
        if isinstance(self.pipeline, Schedule):
            object.__setattr__(self, "pipeline", _clock_table(self.pipeline))
        if self.stage_layers is not None:
            object.__setattr__(self, "stage_layers", tuple(self.stage_layers))
        if problems := self._problems():
            raise PlanError(problems)
        object.__setattr__(self, "offload", tuple(name for name in get_args(Offload) if name in self.offload))

    def _problems(self) -> list[str]:
        found = []
        if self.zero not in (0, 1, 2, 3):
            found.append(f"zero={self.zero!r}: needs 0, 1, 2 or 3")
        if self.within_node and not self.zero:
            found.append("within_node=True shards nothing with zero=0; choose zero 1, 2 or 3")
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            found.append(f"microbatches={self.microbatches!r}: needs a whole number from 1 on")
        for name, value, legal in (
            ("precision", self.precision, get_args(Precision)),
            ("param_dtype", self.param_dtype, get_args(ParamDtype)),
            ("attention", self.attention, get_args(Attention)),
            ("experts", self.experts, get_args(Experts)),
            ("expert_kernel", self.expert_kernel, get_args(ExpertKernel)),
            ("expert_exchange", self.expert_exchange, get_args(ExpertExchange)),
            ("remat", self.remat, (*get_args(Remat), f"{NAMED}<name>,<name>")),
            ("reduce_dtype", self.reduce_dtype, get_args(ParamDtype)),
        ):
            if value not in legal and not (name == "remat" and self.saved_names):
                found.append(f"{name}={value!r}: needs one of {', '.join(legal)}")
        found += self._offload_problems()
        if (self.experts == "capacity") != (self.capacity is not None):
            found.append(f"experts={self.experts!r}, capacity={self.capacity}: write experts=Capacity(1.25)")
        if self.capacity is not None and not self.capacity > 0:
            found.append(f"capacity={self.capacity}: needs a number above 0")
        if self.expert_kernel == "pallas" and self.precision == "float32":
            found.append("expert_kernel='pallas' multiplies bfloat16; set precision='bfloat16' or expert_kernel='loop'")
        return found + self._pipeline_problems() + self._sequence_problems()

    def _sequence_problems(self) -> list[str]:
        seq, found = self.shape.sizes["seq"], []
        if self.ulysses < 1 or (seq > 0 and seq % self.ulysses):
            found.append(f"ulysses={self.ulysses} must divide seq={seq}; choose one of {_divisors(seq)}")
        if self.ulysses > 1 and self.attention != "ring":
            found.append(f"ulysses={self.ulysses} is for groups in a ring; attention={self.attention!r} has none")
        if seq > 1 and self.fill and self.attention == "ring":
            found.append(
                "fill=True lets stages differ in what they play, and a ring's sends must not; choose fill=False, or "
                "attention='ulysses' or 'allgather'"
            )
        return found

    def _pipeline_problems(self) -> list[str]:
        stages = self.shape.sizes["pipe"]
        if stages == 1 and (self.virtual_stages != 1 or self.stage_layers is not None or self.fill):
            return [
                f"virtual_stages={self.virtual_stages}, stage_layers={self.stage_layers}, fill={self.fill} need a "
                f"pipeline; give the mesh stages, e.g. 'pipe=2', or leave them out"
            ]
        try:
            # Stages that are what is left of the devices are checked when these are known.
            self.check_schedule(max(stages, 1))
        except PlanError as error:
            return error.problems
        return []

    def check_schedule(self, stages: int, lanes: int = 1) -> None:
        """Raises the errors of `schedule` without building it."""
        if self._own_schedule is not None:
            self._check_own(self._own_schedule, stages, lanes)
        elif stages > 1:
            check(self.pipeline, stages, self.microbatches, self.virtual_stages, lanes=lanes, fill=self.fill)
        elif self.pipeline not in SCHEDULES:
            check(self.pipeline, 1, 1)

    def schedule(self, stages: int, lanes: int = 1) -> Schedule:
        """The schedule of one step. `lanes`: the model's stacks of layers. Raises `PlanError`."""
        if stages > 1 and self._own_schedule is not None:
            return self._own_schedule
        name = self.pipeline if stages > 1 else "1f1b"
        fill = self.fill and stages > 1
        return build(name, stages, self.microbatches, self.virtual_stages, lanes=lanes, fill=fill)

    def forward_schedule(self, stages: int, microbatches: int, lanes: int = 1) -> Schedule:
        """The schedule of a forward alone, over stages cut as `schedule` has them."""
        folded = self._folded(stages)
        return forward(stages, microbatches, self._chunks(stages), lanes=lanes, folded=folded)

    def stack_layers(self, stacks: Mapping[str, int], stages: int) -> dict[str, StageLayers]:
        """Which layers of each stack (name -> how many) lie on which stage. Raises `PlanError`."""
        self.check_schedule(stages, len(stacks))
        folded = self._folded(stages)
        parts = route(stages, self._chunks(stages), folded)
        counts: Sequence[int] | None = self.stage_layers
        if counts is not None and len(counts) != len(parts) * len(stacks):
            raise PlanError(
                f"stage_layers={counts} needs {len(parts) * len(stacks)} numbers: stages x virtual stages x stacks = "
                f"{stages} x {len(parts) // stages} x {len(stacks)}"
            )
        found = {}
        for i, (name, layers) in enumerate(stacks.items()):
            own = None if counts is None else counts[i * len(parts) : (i + 1) * len(parts)]
            found[name] = stage_layers(name, layers, parts, own)
        return found

    def _offload_problems(self) -> list[str]:
        legal = get_args(Offload)
        if isinstance(self.offload, tuple) and all(name in legal for name in self.offload):
            return []
        return [f"offload={self.offload!r}: needs a tuple of {', '.join(map(repr, legal))}; () for nothing"]

    def _folded(self, stages: int) -> bool:
        return self.pipeline == "zero_bubble_v" and stages > 1

    def _chunks(self, stages: int) -> int:
        if stages > 1 and self._own_schedule is not None:
            return self._own_schedule.chunks
        return 2 if self._folded(stages) else self.virtual_stages

    @property
    def _own_schedule(self) -> Schedule | None:
        return _read_table(self.pipeline) if "|" in self.pipeline else None

    def _check_own(self, own: Schedule, stages: int, lanes: int) -> None:
        found = {"stages": own.stages, "microbatches": own.microbatches, "stacks": 1}
        needed = {"stages": stages, "microbatches": self.microbatches, "stacks": lanes}
        wrong = [f"{found[what]} {what} where the plan has {n}" for what, n in needed.items() if found[what] != n]
        if wrong and stages > 1:
            raise PlanError(f"the pipeline's clock table is for {', '.join(wrong)}: change the one or the other")

    @property
    def shape(self) -> MeshShape:
        return MeshShape.parse(self.mesh)

    def replicas(self, devices_per_node: int) -> int:
        """Into how many groups `data` is cut: 1, or one for each node. The mesh is resolved. Raises `PlanError`."""
        if not self.within_node:
            return 1
        sizes = self.shape.sizes
        inner = sizes["tensor"] * sizes["seq"] * sizes["expert"]
        group = min(sizes["data"], devices_per_node // inner)
        if group == 0 or devices_per_node % inner or sizes["data"] % group:
            raise PlanError(
                f"within_node: nodes of {devices_per_node} devices do not hold whole groups of data={sizes['data']} x "
                f"{inner} (tensor x seq x expert); choose sizes that divide the node, or within_node=False"
            )
        return sizes["data"] // group

    def resolve(self, devices: int) -> "Plan":
        """The plan with -1 replaced by what is left of `devices`."""
        return replace(self, mesh=str(self.shape.resolve(devices)))

    @property
    def rules(self) -> AxisRules:
        norms = "tensor" if self.sequence_sharded_norms else None
        return AxisRules(axes={**DEFAULT_RULES, NORM_POSITIONS: norms})

    @property
    def saved_names(self) -> tuple[str, ...]:
        """What `remat` keeps by name."""
        if not self.remat.startswith(NAMED):
            return ()
        return tuple(name for name in self.remat.removeprefix(NAMED).split(",") if name)

    @property
    def compute_dtype(self) -> Any:
        """Of the layers' activations."""
        return jnp.dtype("bfloat16" if self.precision == "fp8" else self.precision)

    @classmethod
    def auto(cls, build: Any, optimizer: Any, shapes: Mapping[str, Any], **options: Any) -> "Plan":
        """The fastest plan that fits, on the devices at hand or `cluster=`; options are those of `planner.here.auto`.

        `base`: what is kept, such as its precision. Raises `PlanError` with the reason where there is no plan.
        """
        # By name: the planner stands on plans, not they on it.
        return importlib.import_module("jaxpar.planner.here").auto(build, optimizer, shapes, **options)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`. Raises `PlanError` for unknown keys, naming the nearest known one."""
        known = [f.name for f in fields(cls)]
        problems = []
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                problems.append(f"unknown key {key!r}; {hint}")
        if problems:
            raise PlanError(problems)
        return cls(**values)

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Plan({', '.join(changed)})"


def _clock_table(schedule: Schedule) -> str:
    """The whole schedule as text. Raises `PlanError` for what the text cannot say."""
    if schedule.folded or len(set(schedule.lanes)) > 1:
        raise PlanError(f"schedule {schedule.name!r}: one's own has one lane and is no V: name it instead")
    return schedule.draw(width=sys.maxsize, rows=sys.maxsize)


@cache
def _read_table(text: str) -> Schedule:
    return from_table(text)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
