"""Parameters that are whole on every device of `tensor` though they are large enough to be split."""

from collections.abc import Iterator
from math import prod

import numpy as np

from jaxpar.estimate.uses import Uses
from jaxpar.mesh import count
from jaxpar.placement import VOCABULARY, Placement
from jaxpar.run import Run

# Less is not worth a word: norms, biases, routers, positions.
_LEAST_BYTES, _LEAST_SHARE = 32 * 2**20, 0.01


def replicated(run: Run, uses: Uses) -> Iterator[tuple[Placement, int]]:
    """With the bytes of it that a device holds.

    A table of rows that are looked up, or a dim as long as the vocabulary, counts whatever its size.
    """
    if run.mesh.shape["tensor"] == 1:
        return
    held = {path: held_bytes(p, run) for path, p in run.placements.items()}
    for path, p in run.placements.items():
        large = held[path] >= max(_LEAST_BYTES, _LEAST_SHARE * sum(held.values()))
        table = run.structure.vocab_size in p.info.dims or any(use.lookup for use in uses[path])
        if len(p.info.dims) > 1 and _undeclared(p) and (table or large):
            yield p, held[path]


def _undeclared(p: Placement) -> bool:
    """Not split over `tensor`, and not because its names or a rule say so."""
    declared = VOCABULARY not in p.info.names and "positions" in p.info.names
    by_rule = any("replicated over tensor" in note for note in p.notes)
    return "tensor" not in tuple(p.tensor_spec) and not declared and not by_rule


def held_bytes(p: Placement, run: Run) -> int:
    """Of one parameter between steps, on one device."""
    spec = p.param_spec()
    shards = prod(count(run.mesh, axes) for axes in spec if axes is not None)
    return int(np.prod(p.storage_shape)) * np.dtype(p.info.dtype).itemsize // shards
