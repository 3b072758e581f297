"""The memory of the fastest candidates as the step's own parts are traced, in place of arithmetic on sizes."""

from dataclasses import replace

from jaxpar.estimate.step_memory import MemoryModel
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.search import Progress

# Of the candidates that are wanted, how many times as many are traced at most.
TRIED = 3
# Arithmetic may be so far above what is traced: what does not fit by less may fit after all.
MARGIN = 0.3


def sharpen(ranked: Ranked, count: int, progress: Progress = lambda what, done, of: None) -> Ranked:
    """Traces candidates, the fastest first, until `count` of them fit; those that nearly did are among them.

    They come first, with the traced memory; one that does not fit is dropped, with the reason. Traces a layer for each
    new local shape: 0.3 to 7 s, compiling nothing.
    """
    q = ranked.question
    model = MemoryModel(q.structure, q.optimizer, q.batch_axes)
    platform = "cpu" if q.cluster.kind == "cpu" else "cuda"
    nearly = [candidate for candidate in ranked.near if candidate.overflow < MARGIN * candidate.limit]
    pool = sorted((*ranked.found, *nearly), key=lambda candidate: candidate.time.total)[: TRIED * count]
    held, dropped = list[Candidate](), list(ranked.dropped)
    tried = set[int]()
    for candidate in pool:
        if len(held) == count:
            break
        progress("tracing memory", len(held), count)
        tried.add(id(candidate))
        traced = model.predict(candidate.plan, dict(q.shapes), q.devices_per_node, platform)
        sharper = replace(candidate, memory=traced)
        if sharper.fits:
            held.append(sharper)
        else:
            dropped.append((sharper, f"traced, a step takes {gigabytes(traced.total)}: {_too_much(sharper)}"))
    progress("tracing memory", count, count)
    found = (*held, *(c for c in ranked.found if id(c) not in tried))
    near = tuple(c for c in ranked.near if id(c) not in tried)
    counts = replace(ranked.counts, fitting=len(found), large=ranked.counts.legal - ranked.counts.slow - len(found))
    return replace(ranked, found=found, near=near, dropped=tuple(dropped), counts=counts)


def _too_much(candidate: Candidate) -> str:
    return f"{gigabytes(candidate.overflow)} more than there is"
