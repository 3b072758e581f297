"""Asks the compiler about the best candidates: what it contradicts is corrected, or dropped."""

from dataclasses import replace
from math import gcd

from jaxpar.errors import PlanError
from jaxpar.estimate.hardware import Cluster
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress
from jaxpar.program import Program

# How many candidates are compiled at most, and how many times as many as are wanted.
LEAST_TRIED, TRIED = 6, 3


def verify(ranked: Ranked, count: int, progress: Progress = lambda what, done, of: None) -> Ranked:
    """Compiles the real step of candidates, the best first, until `count` of them hold.

    Those get the compiler's report and its memory in place of the predicted one; one that does not fit, cannot be
    compiled as a plan, or moves what the plan does not promise (the lint of `jaxpar compile`) is dropped, with the
    reason. What would not fit either if its prediction were as far off goes to those that nearly fit, uncompiled.
    Raises `BackendError` where the compiler is not installed.
    """
    held: list[Candidate] = []
    dropped = list(ranked.dropped)
    tried, most, factor = set[int](), max(LEAST_TRIED, TRIED * count), 1.0
    for candidate in ranked.found:
        if len(held) == count or len(tried) == most:
            break
        if _too_large(candidate, factor):
            continue
        progress("compiling", len(held), count)
        tried.add(id(candidate))
        compiled, why = _compile(ranked, candidate)
        if why:
            dropped.append((compiled, why))
            factor = max(factor, compiled.peak_bytes / candidate.memory.total)
        else:
            held.append(compiled)
    progress("compiling", count, count)
    others = [candidate for candidate in ranked.found if id(candidate) not in tried]
    large = [candidate.larger(factor) for candidate in others if _too_large(candidate, factor)]
    found = (*held, *(candidate for candidate in others if not _too_large(candidate, factor)))
    near = tuple(sorted((*ranked.near, *large), key=lambda candidate: candidate.overflow))
    counts = replace(
        ranked.counts, contradicted=len(dropped), fitting=len(found), large=ranked.counts.large + len(large)
    )
    return replace(ranked, found=found, near=near, dropped=tuple(dropped), counts=counts)


def _too_large(candidate: Candidate, factor: float) -> bool:
    """Whether it would not fit if its prediction were as far off as another's was."""
    return factor > 1 and candidate.memory.total * factor > candidate.limit


def _compile(ranked: Ranked, candidate: Candidate) -> tuple[Candidate, str]:
    """The candidate with its report, and why it does not hold; empty if it does."""
    q = ranked.question
    program = Program(q.build, q.optimizer, candidate.plan, q.batch_axes)
    try:
        reports = [program.compile(cluster, dict(q.shapes)) for cluster in of_each_kind(q.cluster)]
    except PlanError as error:
        return candidate, "; ".join(error.problems)
    report = max(reports, key=lambda r: r.peak_bytes)
    compiled = replace(candidate, report=report)
    if not compiled.fits:
        return compiled, (
            f"the compiler needs {gigabytes(report.peak_bytes)}, {gigabytes(compiled.overflow)} too much; predicted "
            f"were {gigabytes(candidate.memory.total)}"
        )
    lint = getattr(report, "lint", ())
    return compiled, "; ".join(map(str, lint))


def of_each_kind(cluster: Cluster) -> list[Cluster]:
    """A mixed cluster as often as it has kinds, all its devices of that kind: each part runs a program of its own."""
    if not cluster.more:
        return [cluster]
    node = gcd(*(part.devices_per_node for part in cluster.parts))
    kinds = {part.kind: part for part in cluster.parts}
    return [replace(part, nodes=cluster.size // node, devices_per_node=node) for part in kinds.values()]
