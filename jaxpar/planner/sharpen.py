"""The memory of the fastest candidates as the step's own parts are traced, in place of arithmetic on sizes."""

from dataclasses import dataclass, field, replace

from jaxpar.estimate.step_memory import MemoryModel
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress

# How many candidates are traced at most, and how many times as many as are wanted.
LEAST_TRIED, TRIED = 16, 3
# Arithmetic may be so far above what is traced: what does not fit by less may fit after all.
MARGIN = 0.3
# What was learned of arithmetic from one plan holds so nearly for the next.
SURE = 0.1


def sharpen(ranked: Ranked, count: int, progress: Progress = lambda what, done, of: None) -> Ranked:
    """Traces candidates, the fastest first, until `count` of them fit; those that nearly did are among them.

    They come first, with the traced memory; one that does not fit is dropped, with the reason. By how much arithmetic
    was wrong is learned on the way: what cannot fit then is set aside untraced. Traces a layer for each new local
    shape: 0.3 to 7 s, compiling nothing.
    """
    nearly = [candidate for candidate in ranked.near if candidate.overflow < MARGIN * candidate.limit]
    pool = sorted((*ranked.found, *nearly), key=lambda candidate: candidate.time.total)
    arithmetic, most = _Arithmetic(ranked), max(LEAST_TRIED, TRIED * count)
    held, large, dropped, tried = list[Candidate](), list[Candidate](), list(ranked.dropped), set[int]()
    for candidate in pool:
        if len(held) == count or len(held) + len(dropped) - len(ranked.dropped) == most:
            break
        progress("tracing memory", len(held), count)
        tried.add(id(candidate))
        if arithmetic.rules_out(candidate):
            large.append(arithmetic.corrected(candidate))
        elif (sharper := arithmetic.traced(candidate)).fits:
            held.append(sharper)
        else:
            dropped.append((sharper, f"traced, a step takes {gigabytes(sharper.peak_bytes)}: {_too_much(sharper)}"))
    progress("tracing memory", count, count)
    found = (*held, *(c for c in ranked.found if id(c) not in tried))
    left = [*large, *(sharper for sharper, _ in dropped if not found), *(c for c in ranked.near if id(c) not in tried)]
    near = tuple(sorted(left, key=lambda candidate: candidate.overflow))
    counts = replace(ranked.counts, fitting=len(found), large=ranked.counts.legal - ranked.counts.slow - len(found))
    return replace(ranked, found=found, near=near, dropped=tuple(dropped), counts=counts)


@dataclass
class _Arithmetic:
    """How far it is from what is traced, by how much is recomputed: the rest of a step is exact in both."""

    ranked: Ranked
    _model: MemoryModel = field(init=False)
    _factors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        q = self.ranked.question
        self._model = MemoryModel(q.structure, q.optimizer, q.batch_axes)

    def traced(self, candidate: Candidate) -> Candidate:
        q, guess = self.ranked.question, candidate.memory.total
        platform = "cpu" if q.cluster.chip == "cpu" else "cuda"
        found = self._model.predict(candidate.plan, dict(q.shapes), q.devices_per_node, platform)
        self._factors[candidate.plan.remat] = found.total / max(guess, 1)
        return replace(candidate, memory=found)

    def rules_out(self, candidate: Candidate) -> bool:
        factor = self._factors.get(candidate.plan.remat, 1.0) / (1 + SURE)
        return factor > 1 and candidate.memory.total * factor > candidate.limit

    def corrected(self, candidate: Candidate) -> Candidate:
        return candidate.larger(self._factors[candidate.plan.remat])


def _too_much(candidate: Candidate) -> str:
    return f"{gigabytes(candidate.overflow)} more than there is"
