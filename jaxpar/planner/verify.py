"""Asks the compiler about the best candidates: what it contradicts is corrected, or dropped."""

from dataclasses import replace

from jaxpar.errors import PlanError
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress
from jaxpar.program import Program

# Of the candidates that are wanted, how many times as many are compiled at most.
TRIED = 3


def verify(ranked: Ranked, count: int, progress: Progress = lambda what, done, of: None) -> Ranked:
    """Compiles the real step of candidates, the best first, until `count` of them hold.

    Those get the compiler's report and its memory in place of the predicted one; one that does not fit, cannot be
    compiled as a plan, or moves what the plan does not promise (the lint of `jaxpar compile`) is dropped, with the
    reason. Raises `BackendError` where the compiler is not installed.
    """
    held: list[Candidate] = []
    dropped = list(ranked.dropped)
    tried = 0
    for candidate in ranked.found:
        if len(held) == count or tried == TRIED * count:
            break
        progress("compiling", len(held), count)
        tried += 1
        compiled, why = _compile(ranked, candidate)
        if why:
            dropped.append((compiled, why))
        else:
            held.append(compiled)
    progress("compiling", count, count)
    fitting = ranked.counts.fitting - (len(dropped) - len(ranked.dropped))
    counts = replace(ranked.counts, contradicted=len(dropped), fitting=fitting)
    return replace(ranked, found=(*held, *ranked.found[tried:]), dropped=tuple(dropped), counts=counts)


def _compile(ranked: Ranked, candidate: Candidate) -> tuple[Candidate, str]:
    """The candidate with its report, and why it does not hold; empty if it does."""
    q = ranked.question
    program = Program(q.build, q.optimizer, candidate.plan, q.batch_axes)
    try:
        report = program.compile(q.cluster, dict(q.shapes))
    except PlanError as error:
        return candidate, "; ".join(error.problems)
    compiled = replace(candidate, report=report)
    if not compiled.fits:
        return compiled, (
            f"the compiler needs {gigabytes(report.peak_bytes)}, {gigabytes(compiled.overflow)} too much; predicted "
            f"were {gigabytes(candidate.memory.total)}"
        )
    lint = getattr(report, "lint", ())
    return compiled, "; ".join(map(str, lint))
