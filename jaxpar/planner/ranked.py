"""What a search found: plans that fit, the fastest first; those that nearly do; and why others were left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from jaxpar.errors import PlanError
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.legal import Refused
from jaxpar.planner.question import Question


@dataclass
class Counts:
    """Plans. `refused`: not legal; `slow`: legal, set aside since they cannot be near the best; `large`: do not fit;
    `fitting`: ranked; `contradicted`: dropped since the compiler found something else than predicted."""

    refused: int = 0
    slow: int = 0
    large: int = 0
    fitting: int = 0
    contradicted: int = 0

    @property
    def legal(self) -> int:
        return self.slow + self.large + self.fitting

    def __str__(self) -> str:
        return (
            f"{self.legal:,} legal plans: {self.fitting:,} fit, {self.large:,} do not, {self.slow:,} set aside as too "
            f"slow to be near the best; {self.refused:,} not legal"
        )


@dataclass(frozen=True)
class Ranked(Sequence[Candidate]):
    """Candidates that fit, the fastest first; empty where there are none, and then `reason` says why.

    Attributes:
      near: what does not fit, the smallest overflow first (not all of them).
      counts, refused: what became of the others.
      seconds: what the search took.
      dropped: candidates that the compiler contradicted, with what it found.
    """

    question: Question
    found: tuple[Candidate, ...]
    near: tuple[Candidate, ...]
    counts: Counts
    refused: Refused
    seconds: float
    dropped: tuple[tuple[Candidate, str], ...] = field(default=())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    @property
    def best(self) -> Candidate:
        """Raises `PlanError` with the reason, where there is none."""
        if not self.found:
            raise PlanError(self.reason)
        return self.found[0]

    @property
    def reason(self) -> str:
        """Why there is no plan, with numbers; empty if there is one."""
        q = self.question
        if self.found:
            return ""
        where = f"on {q.cluster}, {q.rows} rows of {q.length} positions"
        if not self.near and self.dropped:
            return f"no plan {where} holds, of {self.counts.legal:,} legal ones. Of the fastest: {self.dropped[0][1]}"
        if not self.near:
            refusals = "; ".join(f"{problem} ({n:,} meshes)" for n, problem in self.refused.reasons(6))
            why = refusals or f"no mesh of the given sizes has {q.cluster.size} devices"
            return f"no plan {where} is legal, of {self.counts.refused:,}: {why}"
        least = self.near[0]
        part, size = max(least.memory.parts.items(), key=lambda item: item[1])
        return (
            f"no plan {where} fits, of {self.counts.legal:,} legal ones. The smallest, {least.plan}, needs "
            f"{gigabytes(least.peak_bytes)} of {gigabytes(least.limit)} on each device: {gigabytes(least.overflow)} "
            f"too much, most of it {part} ({gigabytes(size)})"
        )

    def to_dict(self, most: int = 20) -> dict[str, Any]:
        """For JSON, with so many of the candidates."""
        return {
            "cluster": str(self.question.cluster),
            "rows": self.question.rows,
            "length": self.question.length,
            "counts": vars(self.counts),
            "seconds": self.seconds,
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.found[:most]],
            "near": [candidate.to_dict() for candidate in self.near[:most]],
        }


def gigabytes(size: float) -> str:
    """Bytes as a person reads them; in kB and MB where there are few."""
    if abs(size) < 1e6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.2f} GB" if abs(size) >= 1e9 else f"{size / 1e6:.1f} MB"
