"""Which gathers a plan promises, and which of a compiled program's it does not.

Over `tensor` XLA's partitioner decides what moves; everything else is written out by jaxpar's strategies. So a gather
that was written in jaxpar is promised, except of a parameter that the plan keeps whole; and one that the partitioner
made is not, except of

- activations split by positions between matmuls, where a model asks for it (`sequence_sharded_norms`);
- keys and values of fewer heads than `tensor` has devices, among the devices that share one;
- parameters after their update, which ZeRO 1 and 2 do in parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.estimate.hlo import Collective
from jaxpar.estimate.hlo_text import Leaf
from jaxpar.estimate.source_lines import asked_by
from jaxpar.mesh import ZERO_AXES
from jaxpar.run import Run

# What brings together what lies on several devices, or puts it on others.
GATHERS = ("all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
POSITIONS = "positions"


@dataclass(frozen=True)
class Promises:
    """What one run's plan promises."""

    run: Run

    def broken(self, collectives: tuple[Collective, ...]) -> Iterator[Collective]:
        """Those that nothing promises, each of one array."""
        gathers = (c for c in collectives if c.axes and c.kind in GATHERS)
        return (part for c in gathers for part in c.parts() if not self._promised(part))

    def _promised(self, c: Collective) -> bool:
        if not c.generated:
            return self._written(c)
        if all(axis.partition(":")[0] == "tensor" for axis in c.axes):
            vectors = all(len(leaf.dims) <= 1 for leaf in c.leaves)  # biases, sums: no activation is one
            return not any(c.parameters) and (vectors or self._copies_of_heads(c) or self._positions(c))
        return self._updated_parameters(c)

    def _written(self, c: Collective) -> bool:
        who = asked_by(c.frames)
        if who is not None and not who.ours:
            return c.kind == "collective-permute"
        placements = self.run.placements
        paths = [path for joined in c.parameters for path in joined.split(",") if path]
        return all(placements[path].gathers for path in paths) or c.kind != "all-gather"

    def _copies_of_heads(self, c: Collective) -> bool:
        """Among part of `tensor`: a dim that does not divide is replicated, and XLA still splits what it can of it."""
        replicated = any("replicated over tensor" in note for p in self.run.placements.values() for note in p.notes)
        return replicated and all(":" in axis for axis in c.axes)

    def _positions(self, c: Collective) -> bool:
        """By positions, which lie split between matmuls."""
        norms = self.run.plan.sequence_sharded_norms and c.kind == "all-gather"
        return norms and all(self._by_positions(leaf, c) for leaf in c.leaves)

    def _by_positions(self, leaf: Leaf, c: Collective) -> bool:
        """[rows, positions, features] where jaxpar says so (`ctx.constrain`, a stash), indices of positions, and the
        gradient of a table that has a row for each position."""
        if not leaf.dtype.startswith(("f", "bf")):
            return True
        tables = ((p.info.dims, p.info.names) for p in self.run.placements.values() if POSITIONS in p.info.names)
        if any(dims == leaf.dims and names[c.dim] == POSITIONS for dims, names in tables):
            return True
        rank = len(leaf.dims)
        return (rank, c.dim) in ((3, 1), (2, 0), (2, 1)) and c.frames != () and c.frames[0].ours

    def _updated_parameters(self, c: Collective) -> bool:
        """Once a step, outside the region in which the model runs."""
        once = c.kind == "all-gather" and not c.loop_depth and not any(f.region for f in c.frames)
        return once and self.run.plan.zero in (1, 2) and set(c.axes) <= set(ZERO_AXES)
