"""Plans and times in a person's words."""

from jaxpar.plan import Plan
from jaxpar.planner.candidate import Candidate


def name(candidate: Candidate) -> str:
    """A plan in a line, as a person would say it."""
    plan = candidate.plan
    parts = [
        plan.mesh, f"zero={plan.zero}{' in node' if plan.within_node else ''}", f"{plan.microbatches} microbatches",
        schedule(plan) if plan.shape.pipe > 1 else "", f"remat={plan.remat}", rest(plan, plan),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def schedule(plan: Plan) -> str:
    if plan.shape.pipe == 1:
        return "-"
    virtual = f" x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    return f"{plan.pipeline}{virtual}{' fill' if plan.fill else ''}"


def rest(plan: Plan, base: Plan) -> str:
    found: list[str] = [plan.attention] if plan.shape.seq > 1 else []
    for name in ("precision", "param_dtype", "reduce_dtype", "offload"):
        if (value := getattr(plan, name)) != getattr(base, name):
            found.append(f"{name}={value if isinstance(value, str) else '+'.join(value) or 'none'}")
    return " ".join(found)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"
