"""What the memory of a compiled step is for: parameters, optimizer state, gradients, and the rest."""

from dataclasses import dataclass
from math import prod

import numpy as np

from jaxpar.estimate.hlo_text import Module
from jaxpar.mesh import count
from jaxpar.placement import Placement
from jaxpar.run import Run

_KINDS = {"state.params": "parameters", "state.opt_state": "optimizer"}
_ON_HOST = "S(5)"
_GRADIENT_BYTES = np.dtype(np.float32).itemsize


@dataclass(frozen=True)
class Memory:
    """The peak of one device by kind, in bytes; together they are `StepReport.peak_bytes`.

    Attributes:
      parameters, optimizer: as they lie between steps.
      gradients: what they are accumulated in over the microbatches.
      activations: and all other temporaries: what layers save, gathered weights, results under way.
      other: the batch, counters, and results that take nobody's place.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    other: int


def memory(run: Run, module: Module, peak: int, temporaries: int) -> Memory:
    """`peak`, of which `temporaries` are neither arguments nor results."""
    held = {"parameters": 0, "optimizer": 0}
    for at in module.computations[module.entry].instructions.values():
        kind = next((kind for start, kind in _KINDS.items() if at.op_name.startswith(start)), None)
        if at.opcode == "parameter" and kind and _ON_HOST not in at.shape:
            held[kind] += sum(leaf.nbytes for leaf in at.leaves)
    gradients = min(sum(accumulated_bytes(p, run) for p in run.placements.values()), temporaries)
    rest = peak - temporaries - sum(held.values())
    return Memory(**held, gradients=gradients, activations=temporaries - gradients, other=rest)


def accumulated_bytes(p: Placement, run: Run) -> int:
    """Of one parameter's gradient, in float32, on one device: whole over `data` unless ZeRO 2 or 3 splits it."""
    shards = prod(run.mesh.shape[axis] for _, axis in p.parts)
    shards *= run.mesh.shape["tensor"] if "tensor" in tuple(p.tensor_spec) else 1
    shards *= count(run.mesh, p.zero_axes) if p.scatters_each_microbatch else 1
    return prod(p.local_lead) * prod(p.padded) * _GRADIENT_BYTES // shards
