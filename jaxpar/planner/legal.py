"""Which plans can be run, by the rules that a run itself checks, and what is wrong with the others."""

import re
from dataclasses import dataclass, field

from jaxpar.batch import batch_problems, position_problems, step_problems
from jaxpar.errors import PlanError
from jaxpar.executor.float8 import float8_problems
from jaxpar.parallel.ulysses import head_problems
from jaxpar.placement import placement_problems
from jaxpar.plan import Plan
from jaxpar.planner.question import Question


@dataclass
class Refused:
    """How many plans were refused, and on which meshes for what. Problems that differ in numbers alone are one kind."""

    plans: int = 0
    kinds: dict[str, set[str]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, mesh: str, problems: list[str]) -> None:
        self.plans += 1
        for kind, problem in {re.sub(r"[\d\[\], ]*\d[\d\[\], ]*", "#", p): p for p in problems}.items():
            self.kinds.setdefault(kind, set()).add(mesh)
            self.examples.setdefault(kind, problem)

    def reasons(self, most: int = 5) -> list[tuple[int, str]]:
        """The most frequent problems: on how many meshes plans had each, and one of them."""
        frequent = sorted(self.kinds.items(), key=lambda item: -len(item[1]))
        return [(len(found), self.examples[kind]) for kind, found in frequent[:most]]


@dataclass(frozen=True)
class Legality:
    """`Program.validate` and what a run checks later, for many plans: what several share is checked once."""

    question: Question
    _meshes: dict[tuple, list[str]] = field(default_factory=dict)

    def problems(self, plan: Plan) -> list[str]:
        """Everything wrong with a plan whose mesh has no -1; nothing if it can be run."""
        found = list(self._of_mesh(plan))
        sizes, q = plan.shape.sizes, self.question
        try:
            plan.check_schedule(sizes["pipe"], len(q.structure.stacks))
        except PlanError as error:
            found += error.problems
        return found + batch_problems(q.shapes, q.batch_axes, plan) + self._step_problems(plan)

    def _step_problems(self, plan: Plan) -> list[str]:
        return step_problems(self.question.structure.step_wide, plan) + float8_problems(plan)

    def _of_mesh(self, plan: Plan) -> list[str]:
        """What microbatches do not change."""
        key = (plan.mesh, plan.pipeline, plan.virtual_stages, plan.attention, plan.ulysses)
        if (found := self._meshes.get(key)) is None:
            q = self.question
            found = placement_problems(q.structure, plan, plan.shape)
            found += position_problems(q.batch_axes, q.structure.mixing, plan) + self._head_problems(plan)
            self._meshes[key] = found
        return found

    def _head_problems(self, plan: Plan) -> list[str]:
        sizes = plan.shape.sizes
        members = sizes["seq"] if plan.attention == "ulysses" else plan.ulysses
        found = []
        for layer, _ in self.question.work.layers:
            if members > 1 and layer.heads:
                found += head_problems(layer.heads, layer.kv_heads, members, sizes["tensor"])
        return list(dict.fromkeys(found))


def replica_groups(plan: Plan, devices_per_node: int) -> int:
    """Into how many groups ZeRO within nodes would cut `data`; 1 where it cannot."""
    try:
        return Plan(mesh=plan.mesh, zero=1, within_node=True).replicas(devices_per_node)
    except PlanError:
        return 1
