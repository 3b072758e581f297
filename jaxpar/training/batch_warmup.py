"""Fewer rows per step at the start of a run, more by stages, each of them compiled once.

The rows of a microbatch stay what they are and their number grows, so that no stage needs more memory than the last;
below one microbatch it is the microbatch that is smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpar.errors import ConfigError, PlanError
from jaxpar.plan import Plan
from jaxpar.training.callbacks import Loop


@dataclass(frozen=True)
class BatchWarmup:
    """Rows per step `start_rows`, then `factor` times as many, and so on up to the rows of the data, then for good.

    Small batches learn more from a token while the loss still falls fast (McCandlish et al., An Empirical Model of
    Large-Batch Training, 2018).

    Attributes:
      start_rows: of the first step, over all replicas.
      updates: of the optimizer, shared evenly by the stages before the last; 0: no warm-up. As everywhere, a skipped
        step is none.
      factor: from stage to stage.
    """

    start_rows: int = 1
    updates: int = 0
    factor: int = 2

    def __post_init__(self) -> None:
        rules = {
            "start_rows": (self.start_rows >= 1, "1 or more"),
            "updates": (self.updates >= 0, "0 (no warm-up) or more"),
            "factor": (self.factor >= 2, "2 or more"),
        }
        if not self.updates:
            rules["start_rows"] = (self.start_rows == 1, "left alone with updates=0, which is no warm-up")
        wrong = [f"{name} must be {need}, found {getattr(self, name)}" for name, (ok, need) in rules.items() if not ok]
        if wrong:
            raise ConfigError("batch_warmup: " + "; ".join(wrong))

    def sizes(self, rows: int) -> list[int]:
        """Rows of each stage; the last are `rows`."""
        sizes = [self.start_rows]
        while sizes[-1] * self.factor < rows:
            sizes.append(sizes[-1] * self.factor)
        return [*sizes, rows]


@dataclass(frozen=True)
class Stage:
    """What holds from update `first_update` on, counted from 0."""

    first_update: int
    rows: int
    microbatches: int


def batch_stages(warmup: BatchWarmup, rows: int, plan: Plan, stacks: int = 1) -> list[Stage]:
    """The stages of a run whose full steps have `rows` rows, none without a warm-up.

    `plan`: with its mesh resolved; `stacks`: of the model's layers. Raises `PlanError` for sizes that the plan cannot
    split, naming the nearest `start_rows` that it can, and for fewer microbatches than its pipeline can do with.
    """
    if not warmup.updates:
        return []
    if warmup.start_rows >= rows:
        raise PlanError(f"batch_warmup: start_rows={warmup.start_rows} must be fewer than the {rows} rows of a step")
    sizes = warmup.sizes(rows)
    if wrong := [size for size in sizes if not _microbatches(size, rows, plan)]:
        raise PlanError(_problem(warmup, wrong, rows, plan))
    for size in sizes:
        microbatches = _microbatches(size, rows, plan)
        try:
            replace(plan, microbatches=microbatches).check_schedule(plan.shape.sizes["pipe"], stacks)
        except PlanError as error:
            found = "; ".join(error.problems)
            raise PlanError(f"batch_warmup: steps of {size} rows have {microbatches} microbatches: {found}") from error
    firsts = [warmup.updates * i // (len(sizes) - 1) for i in range(len(sizes))]
    return [Stage(first, size, _microbatches(size, rows, plan)) for first, size in zip(firsts, sizes, strict=True)]


def _replicas(plan: Plan) -> int:
    return plan.shape.sizes["data"] * plan.shape.sizes["expert"]


def _microbatches(size: int, rows: int, plan: Plan) -> int:
    """In how many parts `size` rows are worked through; 0 where they cannot be."""
    if size % _replicas(plan) or rows % plan.microbatches:
        return 0
    each = rows // plan.microbatches
    if size < each:
        return 1
    return 0 if size % each else size // each


def _problem(warmup: BatchWarmup, wrong: Sequence[int], rows: int, plan: Plan) -> str:
    def legal(start: int) -> bool:
        return all(_microbatches(size, rows, plan) for size in replace(warmup, start_rows=start).sizes(rows))

    below = next((n for n in range(warmup.start_rows - 1, 0, -1) if legal(n)), None)
    above = next((n for n in range(warmup.start_rows + 1, rows) if legal(n)), None)
    near = " or ".join(str(n) for n in (below, above) if n is not None)
    mend = f"the nearest start_rows that do: {near}" if near else "no start_rows does; change factor, rows or the plan"
    return (
        f"batch_warmup: steps of {', '.join(map(str, wrong))} rows do not divide into {_replicas(plan)} replicas "
        f"(data x expert) and microbatches of {rows} / {plan.microbatches} rows; {mend}"
    )


class BatchStages:
    """Which stage a run is in. `run`: the run with that stage's microbatches."""

    def __init__(self, loop: Loop, stages: Sequence[Stage]):
        self._loop, self._stages, self._at = loop, stages, -1
        self._skipped = int(loop.state.skipped)
        self.run = loop.run

    def turn(self) -> bool:
        """Goes to the stage of the next step; whether that is another one.

        Steps are counted without waiting for the devices. How many of them were updates is asked only where it decides.
        """
        before = self._at
        while self._due():
            self._at += 1
        if self._at == before:
            return False
        stage, run = self._stages[self._at], self._loop.run
        same = stage.microbatches == run.plan.microbatches
        self.run = run if same else replace(run, plan=replace(run.plan, microbatches=stage.microbatches))
        self._loop.data.resize(stage.rows)
        return True

    def _due(self) -> bool:
        if self._at + 1 == len(self._stages):
            return False
        first = self._stages[self._at + 1].first_update
        if self._loop.step - self._skipped < first:
            return False
        if self._loop.step:
            self._loop.settle()
            self._skipped = int(self._loop.state.skipped)
        return self._loop.step - self._skipped >= first
