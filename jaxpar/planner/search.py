"""The search: every legal plan's time and memory, the slow and the large ones set aside, the rest ranked."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax
import optax

from jaxpar.batch import TOKENS, BatchAxes
from jaxpar.errors import PlanError
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.layout import Layout, remat_of
from jaxpar.estimate.system import JAXPAR, System
from jaxpar.estimate.time import Estimator
from jaxpar.mesh import MeshShape
from jaxpar.plan import Plan
from jaxpar.planner.calibration import Calibration
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.legal import Legality, Refused, replica_groups
from jaxpar.planner.memory import memory
from jaxpar.planner.offload import offload_time
from jaxpar.planner.question import Question
from jaxpar.planner.ranked import Counts, Ranked
from jaxpar.planner.space import Space, Variant, meshes, trunks, variants
from jaxpar.structure import Build

# Told what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]
# Plans that cannot be faster than this many times the best one are set aside without a look at their variants.
SLOWER = 1.2
# How many of those that do not fit are kept, of the smallest overflow.
KEPT = 200


def search(
    build: Build,
    optimizer: optax.GradientTransformation,
    cluster: str | Cluster,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    base: Plan | None = None,
    space: Space | None = None,
    batch_axes: BatchAxes = TOKENS,
    experts_per_token: int | None = None,
    budget: int | None = None,
    system: System = JAXPAR,
    calibration: Calibration | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Ranked:
    """Every legal plan that fits, the fastest first, as predicted; nothing is compiled.

    `shapes`: of one step's global batch (`token_shapes`). `base`: what is kept of a plan, such as its precision; its
    mesh is not. `space`: what may change. `experts_per_token`: of a model with experts, if `build` is not a method of a
    config that says so. `budget`: bytes for a step on each device, by default 0.9 of its memory. Where nothing fits,
    or nothing is legal, the result is empty and says why: `Ranked.reason`. `calibration`: what steps taught that
    `planner.measure` timed.
    Raises `ConfigError` for what cannot be read, `ModelError` for a model that breaks the protocol.
    """
    question = Question(
        build, optimizer, Cluster.parse(cluster) if isinstance(cluster, str) else cluster, shapes,
        Plan() if base is None else base, Space() if space is None else space, batch_axes, experts_per_token, budget,
        system, calibration,
    )  # fmt: skip
    return Search(question).run(progress)


@dataclass(frozen=True)
class Trunk:
    """A legal plan without ZeRO that recomputes nothing. `bound`: seconds that no variant of it goes below."""

    plan: Plan
    layout: Layout
    bound: float
    replicas: int


@dataclass
class Search:
    question: Question
    refused: Refused = field(default_factory=Refused)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        q = self.question
        self.legality, self.estimator = Legality(q), Estimator(q.work, q.device, q.system)
        self._near: list[tuple[int, int, Candidate]] = []
        self._fitting: list[Candidate] = []
        self._ids = itertools.count()

    def run(self, progress: Progress = lambda what, done, of: None) -> Ranked:
        started = time.perf_counter()
        shapes = list(meshes(self.question.space, self.question.sizes))
        found: list[Trunk] = []
        for i, shape in enumerate(shapes):
            progress("legal plans", i, len(shapes))
            found += self.trunks(shape)
        found.sort(key=lambda trunk: trunk.bound)
        best = float("inf")
        for i, trunk in enumerate(found):
            if trunk.bound > SLOWER * best:
                self.counts.slow += sum(len(self._variants(t)) for t in found[i:])
                break
            if i % 64 == 0:
                progress("time and memory", i, len(found))
            best = min(best, self._take(trunk))
        progress("time and memory", len(found), len(found))
        self._fitting.sort(key=lambda candidate: (candidate.time.total, candidate.peak_bytes))
        near = tuple(candidate for *_, candidate in sorted(self._near, reverse=True))
        self.counts.fitting, self.counts.refused = len(self._fitting), self.refused.plans
        seconds = time.perf_counter() - started
        return Ranked(self.question, tuple(self._fitting), near, self.counts, self.refused, seconds)

    def trunks(self, shape: MeshShape) -> Iterator[Trunk]:
        q = self.question
        for plan in trunks(q.space, q.base, q.sizes, shape):
            if problems := plan.problems if isinstance(plan, PlanError) else self.legality.problems(plan):
                self.refused.add(str(shape), problems)
                continue
            assert isinstance(plan, Plan)
            layout = Layout.of(plan, q.rows, q.length, q.cluster.size, q.devices_per_node)
            step = self.estimator.step(layout)
            step = q.calibration.applied(step) if q.calibration else step
            bound = step.total - step.data - step.optimizer - step.spread - step.contention
            yield Trunk(plan, layout, bound, replica_groups(plan, q.devices_per_node))

    def evaluate(self, plan: Plan) -> Candidate:
        """Of any plan, by the same measure as those that are ranked. Raises `PlanError` if it is not legal."""
        q = self.question
        plan = plan.resolve(q.cluster.size)
        if problems := self.legality.problems(plan):
            raise PlanError(problems)
        return self._candidate(plan, Layout.of(plan, q.rows, q.length, q.cluster.size, q.devices_per_node))

    def _take(self, trunk: Trunk) -> float:
        """Keeps what fits of a trunk's variants; if the smallest does not, it alone is looked at. Seconds of the best
        that fits."""
        options, best = self._variants(trunk), float("inf")
        smallest = max(options, key=_frugality)
        least = self._variant(trunk, smallest)
        if not least.fits:
            self.counts.large += len(options)
            self._keep_near(least)
            return best
        for variant in options:
            candidate = least if variant is smallest else self._variant(trunk, variant)
            if candidate.fits:
                self._fitting.append(candidate)
                best = min(best, candidate.time.total)
            else:
                self.counts.large += 1
                self._keep_near(candidate)
        return best

    def _keep_near(self, candidate: Candidate) -> None:
        push = heapq.heappush if len(self._near) < KEPT else heapq.heappushpop
        push(self._near, (-candidate.overflow, next(self._ids), candidate))

    def _variants(self, trunk: Trunk) -> list[Variant]:
        q = self.question
        return variants(q.space, q.base, q.sizes, trunk.layout.data * trunk.layout.seq, trunk.replicas)

    def _variant(self, trunk: Trunk, variant: Variant) -> Candidate:
        plan, data = variant.of(trunk.plan), trunk.layout.data
        shard = data // trunk.replicas if variant.within_node else data
        return self._candidate(plan, replace(trunk.layout, zero=variant.zero, remat=remat_of(plan), shard=shard))

    def _candidate(self, plan: Plan, layout: Layout) -> Candidate:
        q = self.question
        step = self.estimator.step(layout)
        held = memory(q.work, layout, plan, step.in_flight, q.state_bytes)
        if plan.offload:
            step = replace(step, host=step.host + offload_time(q.work, layout, plan, step.in_flight, q.state_bytes))
        if q.calibration is not None:
            step = q.calibration.applied(step)
        return Candidate(plan, layout, step, held, q.limit, q.rows * q.length)


def _frugality(variant: Variant) -> tuple:
    """Larger: holds less."""
    remat = {"none": 0, "dots": 1, "full": 3}.get(variant.remat, 2)
    return variant.zero, not variant.within_node, remat, len(variant.offload), variant.param_dtype == "bfloat16"
