"""A plan that a search found: how long its step takes, and what it holds."""

from dataclasses import dataclass, replace
from typing import Any

from jaxpar.estimate.compile import StepReport
from jaxpar.estimate.layout import Layout
from jaxpar.estimate.step_memory import StepMemory
from jaxpar.estimate.time import StepTime
from jaxpar.plan import Plan
from jaxpar.planner.memory import Memory


@dataclass(frozen=True)
class Candidate:
    """One plan on one cluster.

    Attributes:
      plan: its mesh has no -1.
      time: seconds of a step, by part.
      memory: predicted bytes on each device, by part: by arithmetic, or traced (see `sharpen`).
      limit: bytes that a step may take.
      tokens: of a step, positions of all rows.
      report: what the compiler says of it, if it was asked.
      measured: seconds of a step on the devices at hand, if they were asked.
    """

    plan: Plan
    layout: Layout
    time: StepTime
    memory: Memory | StepMemory
    limit: int
    tokens: int
    report: StepReport | None = None
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step: measured, if it was, else as predicted."""
        return self.time.total if self.measured is None else self.measured

    @property
    def peak_bytes(self) -> int:
        """The compiler's, if it was asked, else as predicted."""
        return self.memory.total if self.report is None else self.report.peak_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit

    @property
    def overflow(self) -> int:
        """Bytes above the limit; below 0: room left."""
        return self.peak_bytes - self.limit

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def larger(self, factor: float) -> "Candidate":
        """With that many times the predicted memory: others' was so far off."""
        parts: dict[str, Any] = {name: int(size * factor) for name, size in self.memory.parts.items()}
        return replace(self, memory=replace(self.memory, **parts))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": self.plan.to_dict(),
            "seconds": self.seconds,
            "predicted_seconds": self.time.total,
            "seconds_by_part": self.time.parts,
            "tokens_per_second": self.tokens_per_second,
            "bytes": self.memory.total,
            "bytes_by_part": self.memory.parts,
            "limit_bytes": self.limit,
            "fits": self.fits,
            "compiled_peak_bytes": None if self.report is None else self.report.peak_bytes,
        }
