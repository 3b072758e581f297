"""The program: a model, an optimizer and a plan, before it is known where they run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import optax

from jaxpar.batch import TOKENS, BatchAxes, batch_problems, position_problems, step_problems
from jaxpar.errors import PlanError
from jaxpar.estimate.compile import StepReport, step_report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.step_memory import MemoryModel, StepMemory
from jaxpar.estimate.topology import topology_devices
from jaxpar.executor.float8 import float8_problems
from jaxpar.mesh import make_mesh
from jaxpar.parallel import expert_trade, grouped_kernel
from jaxpar.placement import placement_problems
from jaxpar.plan import Plan
from jaxpar.run import Run
from jaxpar.structure import Build, Structure, inspect_model, stored_as

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Program:
    """What is trained and how.

    Attributes:
      build: `build(rngs) -> nnx.Module` that follows `jaxpar.model.Model`.
      optimizer: any optax transformation. It sees flat dicts `path -> array` of logical sizes, a stack's parameters as
        `[virtual stage, stage, layer, *dims]`, and the true global gradients, so that norms and clipping are right.
        One that looks at an array as a whole, such as adafactor, sees a whole stack in it: `jaxpar.per_layer`.
      plan: how it is spread.
      batch_axes: for each array of a batch, `"rows"`, `"positions"` or None for each dim.
    """

    build: Build
    optimizer: optax.GradientTransformation
    plan: Plan
    batch_axes: BatchAxes = field(default_factory=lambda: TOKENS)

    @cached_property
    def structure(self) -> Structure:
        return inspect_model(self._stored)

    @property
    def _stored(self) -> Build:
        dtype = self.plan.param_dtype
        return self.build if dtype == "float32" else stored_as(self.build, dtype)

    def validate(self, shapes: Shapes | None = None, devices: int | None = None) -> None:
        """Raises one `PlanError` that lists every problem, before anything compiles.

        `shapes`: of one whole step's batch (see `token_shapes`); `devices`: how many there will be (default: all here).
        """
        plan = self.plan
        problems = float8_problems(plan)
        try:
            plan = plan.resolve(jax.device_count() if devices is None else devices)
        except PlanError as error:
            problems += error.problems
        if plan.shape.fixed_size() is not None:
            problems += placement_problems(self.structure, plan, plan.shape)
            problems += position_problems(self.batch_axes, self.structure.mixing, plan)
            problems += step_problems(self.structure.step_wide, plan)
            problems += batch_problems(shapes, self.batch_axes, plan) if shapes is not None else []
        if problems:
            raise PlanError(problems)

    def on(self, devices: Sequence[jax.Device] | None = None, devices_per_node: int | None = None) -> Run:
        """The program on these devices (default: all). Raises `PlanError`; compiles on first use.

        `devices_per_node`: how many neighbours share a node; by default, as many as share a process.
        """
        devices = jax.devices() if devices is None else list(devices)
        self.validate(devices=len(devices))
        plan = self.plan.resolve(len(devices))
        problems = grouped_kernel.device_problems(devices[0]) if plan.expert_kernel == "pallas" else []
        problems += expert_trade.device_problems(devices[0]) if plan.expert_exchange == "ragged" else []
        if problems:
            raise PlanError(problems)
        if devices_per_node is None:
            devices_per_node = min(Counter(d.process_index for d in devices).values())
        mesh = make_mesh(plan.shape, devices, plan.replicas(devices_per_node))
        return Run(self._stored, self.structure, self.optimizer, plan, self.batch_axes, mesh)

    def compile(self, cluster: str | Cluster, shapes: Shapes) -> StepReport:
        """Compiles the real step for devices that need not be there, e.g. `"4x8xh100"`, and reads the program.

        `shapes`: of one step's global batch. Raises `PlanError`, or `BackendError` when the compiler is not installed.
        """
        cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        devices = topology_devices(cluster)
        self.validate(shapes, len(devices))
        run = self.on(devices, cluster.devices_per_node)
        predicted = self.memory(cluster, shapes).total
        return replace(step_report(run, run.lower(shapes)), predicted_peak_bytes=predicted)

    def memory(self, cluster: str | Cluster, shapes: Shapes) -> StepMemory:
        """The bytes that a step takes on one device of this cluster, by what they are for, without compiling.

        `shapes`: of one step's global batch. The program must be valid there, see `validate`.
        """
        cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        model = MemoryModel(self.structure, self.optimizer, self.batch_axes)
        platform = "cpu" if cluster.chip == "cpu" else "cuda"
        return model.predict(self.plan.resolve(cluster.size), shapes, cluster.devices_per_node, platform)
