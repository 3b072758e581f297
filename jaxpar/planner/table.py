"""Candidates as a table that a person reads."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxpar.plan import Plan
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked, gigabytes
from jaxpar.planner.scaling import Scaling
from jaxpar.planner.words import name, rest, schedule, seconds

_HEAD = ("", "mesh", "zero", "schedule", "micro", "remat", "rest", "step", "tokens/s", "memory", "compiled", "measured")


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
        "" if candidate.measured is None else seconds(candidate.measured),
    )


def show(ranked: Ranked, most: int, console: Console) -> None:
    """The best candidates, and what became of the others; of none, why."""
    q = ranked.question
    kept = ", ".join(q.space.precision) if q.space.precision else f"{q.base.precision} (kept)"
    console.print(
        f"{q.cluster}: {q.rows} rows of {q.length} positions, {q.work.parameters / 1e9:.3g}B parameters, {kept}, "
        f"{gigabytes(q.limit)} of each device",
        highlight=False,
    )
    if q.cluster.more:
        console.print(
            f"all wait for all: timed as if every device were the slowest of any part ({q.device.name}), with the "
            f"least memory and links; equal rows for each",
            highlight=False,
        )
    console.print(f"{ranked.counts}; {ranked.seconds:.1f} s", highlight=False)
    if q.calibration is not None:
        console.print(f"corrected by measured steps: {q.calibration.factors}", highlight=False)
    if ranked.found:
        console.print(table(ranked.found[:most], q.base))
    else:
        console.print(ranked.reason, highlight=False)
    for candidate, why in ranked.dropped:
        console.print(f"dropped {candidate.plan}: {why}", highlight=False)


def show_scaling(scaling: Scaling, console: Console) -> None:
    """A line for each number of devices, and what to rent."""
    tokens = scaling.tokens
    found = Table("cluster", "step", "tokens/s", "of linear", "hours", "cost", "best plan", box=None, pad_edge=False)
    base = next((p for p in scaling.points if p.best), None)
    for point in scaling.points:
        if point.best is None or base is None:
            found.add_row(str(point.cluster), "", "", "", "", "", point.reason)
            continue
        cost = None if tokens is None else point.cost(tokens)
        found.add_row(
            str(point.cluster), seconds(point.best.time.total), f"{point.best.tokens_per_second:,.0f}",
            f"{point.efficiency(base):.1%}", "" if tokens is None else f"{point.hours(tokens):,.1f}",
            "" if cost is None else f"{cost:,.0f}", name(point.best),
        )  # fmt: skip
    console.print(found)
    if scaling.verdict:
        console.print(scaling.verdict, highlight=False)
