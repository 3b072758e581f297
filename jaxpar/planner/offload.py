"""What waiting in the host's memory costs a step: bytes over the link to the host, there and back."""

from dataclasses import replace

from jaxpar.estimate.layout import Layout
from jaxpar.estimate.work import Work
from jaxpar.plan import Plan
from jaxpar.planner.memory import memory

# Bytes/s of one device to its host: PCIe 4 x16, four fifths of its 32 GB/s. Newer GPUs have twice that.
HOST_BANDWIDTH = 25e9


def offload_time(work: Work, layout: Layout, plan: Plan, in_flight: int, state_bytes: float) -> float:
    """Seconds of a step, none of them hidden: an upper bound. `in_flight`, `state_bytes`: as `memory` takes them."""
    held = memory(work, layout, replace(plan, offload=()), in_flight, state_bytes)
    moved = float(held.optimizer) if "optimizer" in plan.offload else 0.0
    if "activations" in plan.offload:
        # Those in flight at once are of so many of a step's chunks.
        moved += held.activations * layout.microbatches * layout.chunks / max(1, in_flight)
    return 2 * moved / HOST_BANDWIDTH
