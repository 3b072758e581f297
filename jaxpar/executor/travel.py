"""What goes from stage to stage: a forward's result to the next part of the model, a backward's to the one before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from jaxpar import collectives
from jaxpar.executor.buffers import put, select
from jaxpar.executor.rows import Row
from jaxpar.pipeline.schedule import Kind
from jaxpar.pipeline.table import NONE, Segment, Table

Carry = dict[str, Any]


@dataclass(frozen=True)
class Travel:
    """In the carry, `sent.<slot>` is what a forward's slot has sent, by direction, and what a backward's will send."""

    table: Table

    @property
    def steps(self) -> tuple[int, ...]:
        """The ways in which forwards send."""
        return (1, -1) if self.table.schedule.folded else (1,)

    @property
    def _ring(self) -> bool:
        return self.table.schedule.chunks > 1 and not self.table.schedule.folded

    def send(self, x: Any) -> dict[int, Any]:
        """A forward's result, by direction, at its neighbours."""
        return {step: collectives.to_neighbour(x, step, self._ring) for step in self.steps}

    def arrive(self, segment: Segment, row: Row, carry: Carry, kind: Kind) -> Carry:
        """Puts what neighbours sent in the tick before where the table says."""
        name = "inputs" if kind == Kind.F else "cotangents"
        for i in self._arriving(segment, kind):
            sent, mine = carry[f"sent.{i}"], row.slots[i]
            # What goes one stage up comes from the stage before.
            got = sent.get(1, sent.get(-1))
            if len(sent) == 2:
                got = select(mine["from_next"] == 1, sent[-1], sent[1])
            carry = carry | {name: put(carry[name], got, mine["arrives"], mine["arrives"] != NONE)}
        return carry

    def depart(self, segment: Segment, carry: Carry) -> Carry:
        """What backwards of the tick before send, on its way: it is not needed before this tick's forward has run."""
        return {f"sent.{i}": self._back(carry[f"sent.{i}"]) for i in self._arriving(segment, Kind.B)}

    def land(self, segment: Segment, row: Row, carry: Carry, travelling: Carry, after: str | None) -> Carry:
        """Puts that in place. `after`: the result of the forward that it travelled beside; a barrier keeps XLA from
        starting the journey only when that is done."""
        if travelling and after in carry:
            carry[after], travelling = lax.optimization_barrier((carry[after], travelling))
        sent = {name: carry[name] for name in travelling}
        return self.arrive(segment, row, carry | travelling, Kind.B) | sent

    def stay(self, i: int, buffer: Any, x: Any, mine: Mapping[str, Array]) -> Any:
        """Hands on what the next part, on the same stage, needs."""
        if (self.table.slots[i].stays == NONE).all():
            return buffer
        return put(buffer, x, mine["stays"], mine["stays"] != NONE)

    def _back(self, x: Any) -> dict[int, Any]:
        return {-step: collectives.to_neighbour(x, -step, self._ring) for step in self.steps}

    def _arriving(self, segment: Segment, kind: Kind) -> list[int]:
        """The slots of this kind from which something arrives in these ticks."""
        return [
            i
            for i, slot in enumerate(self.table.schedule.slots)
            if slot.kind == kind and (self.table.slots[i].arrives[segment.start : segment.stop] != NONE).any()
        ]
