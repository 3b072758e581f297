"""Candidates as a table that a person reads."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxpar.plan import Plan
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes

_HEAD = ("", "mesh", "zero", "schedule", "micro", "remat", "rest", "step", "tokens/s", "memory", "compiled")


def table(candidates: Sequence[Candidate], base: Plan) -> Table:
    """`rest`: what differs from `base` besides the named columns."""
    found = Table(*_HEAD, box=None, pad_edge=False)
    for i, candidate in enumerate(candidates, 1):
        found.add_row(str(i), *cells(candidate, base))
    return found


def cells(candidate: Candidate, base: Plan) -> tuple[str, ...]:
    plan, report = candidate.plan, candidate.report
    return (
        plan.mesh,
        f"{plan.zero}{' in node' if plan.within_node else ''}",
        schedule(plan),
        str(plan.microbatches),
        plan.remat,
        rest(plan, base),
        seconds(candidate.time.total),
        f"{candidate.tokens_per_second:,.0f}",
        gigabytes(candidate.memory.total),
        "" if report is None else gigabytes(report.peak_bytes),
    )


def schedule(plan: Plan) -> str:
    if plan.shape.pipe == 1:
        return "-"
    virtual = f" x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    return f"{plan.pipeline}{virtual}{' fill' if plan.fill else ''}"


def rest(plan: Plan, base: Plan) -> str:
    found = [plan.attention] if plan.shape.seq > 1 else []
    for name in ("precision", "param_dtype", "reduce_dtype", "offload"):
        if (value := getattr(plan, name)) != getattr(base, name):
            found.append(f"{name}={value if isinstance(value, str) else '+'.join(value) or 'none'}")
    return " ".join(found)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def show(ranked: Ranked, most: int, console: Console) -> None:
    """The best candidates, and what became of the others; of none, why."""
    q = ranked.question
    console.print(
        f"{q.cluster}: {q.rows} rows of {q.length} positions, {q.work.parameters / 1e9:.3g}B parameters, "
        f"{q.base.precision} kept, {gigabytes(q.limit)} of each device"
        if not q.space.precision
        else f"{q.cluster}: {q.rows} rows of {q.length} positions, {q.work.parameters / 1e9:.3g}B parameters",
        highlight=False,
    )
    console.print(f"{ranked.counts}; {ranked.seconds:.1f} s", highlight=False)
    if ranked.found:
        console.print(table(ranked.found[:most], q.base))
    else:
        console.print(ranked.reason, highlight=False)
    for candidate, why in ranked.dropped:
        console.print(f"dropped {candidate.plan}: {why}", highlight=False)
