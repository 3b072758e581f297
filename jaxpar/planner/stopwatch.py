"""Steps of plans, timed on the devices at hand: one plan after another, or several in turns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxpar.plan import Plan
from jaxpar.planner.question import Question
from jaxpar.program import Program
from jaxpar.run import Run

STEPS, ROUNDS = 5, 5


@dataclass
class Stopwatch:
    """Keeps what it compiled, not its state: between timings a plan holds no memory of the devices."""

    question: Question
    _ready: dict[Plan, tuple[Run, Any]] = field(default_factory=dict, repr=False)

    def seconds(self, plan: Plan) -> float:
        """Of a step: the median of a few, after one that compiles."""
        return median(self._steps(plan, STEPS))

    def in_turns(self, plans: Sequence[Plan], rounds: int = ROUNDS) -> dict[Plan, list[float]]:
        """Seconds of each plan's steps in each of so many rounds: what slows the machine for a while slows all."""
        found: dict[Plan, list[float]] = {plan: [] for plan in plans}
        for i in range(rounds):
            for plan in plans if i % 2 == 0 else reversed(plans):
                found[plan].append(median(self._steps(plan, 2)))
        return found

    def _steps(self, plan: Plan, count: int) -> list[float]:
        run, batch = self._prepared(plan)
        state, metrics = run.step(run.init(seed=0), batch)
        jax.block_until_ready((state, metrics))
        found = []
        for _ in range(count):
            started = time.perf_counter()
            state, metrics = run.step(state, batch)
            jax.block_until_ready((state, metrics))
            found.append(time.perf_counter() - started)
        return found

    def _prepared(self, plan: Plan) -> tuple[Run, Any]:
        q = self.question
        if plan not in self._ready:
            self._ready[plan] = Program(q.build, q.optimizer, plan, q.batch_axes).on(), filled(q.shapes)
        run, batch = self._ready[plan]
        return run, run.put(batch)


def filled(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Tokens 0 and 1 at random, which every vocabulary has; weights 1, positions in order."""
    rng = np.random.default_rng(0)
    return {name: _filled(name, x, rng) for name, x in shapes.items()}


def _filled(name: str, x: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    if name == "positions":
        return np.broadcast_to(np.arange(x.shape[1], dtype=x.dtype), x.shape)
    if name in ("tokens", "targets"):
        return rng.integers(0, 2, x.shape).astype(x.dtype)
    return np.full(x.shape, 1 if np.issubdtype(x.dtype, np.floating) else 0, x.dtype)
