"""Plays a schedule on one stage: forwards, heads, backwards and weights' parts, tick by tick, from its table.

All stages run the same program. A slot that any stage plays is run by all of them; where a stage has no task, what it
computes is masked. Ticks that play the same slots are one `lax.scan`, so that the program does not grow with the
microbatches. Without a pipeline this is the schedule of one stage: a forward and a backward in every tick.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar import collectives
from jaxpar.executor.chunks import At, Chunks, cut, paste, read, write
from jaxpar.executor.ends import Batch, Ends, add_totals
from jaxpar.executor.layer import Totals
from jaxpar.model import Context
from jaxpar.pipeline.schedule import Kind
from jaxpar.pipeline.table import NONE, Segment, Table
from jaxpar.structure import Params

# What goes from tick to tick, by name; names that start with "now." end with the tick.
Carry = dict[str, Any]

_NOW = "now."


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
    """One tick of the table as this stage reads it: by slot the fields of `Played`, those of the ends, and by slot
    whether any stage plays it."""

    slots: tuple[dict[str, Array], ...]
    ends: dict[str, Array]
    played: tuple[Array, ...]


@dataclass(frozen=True)
class Player:
    """`chunks`: one for each lane, in depth order. `batches`, `contexts`: with the microbatches in front. `scales`:
    gradients of the totals; None: a table of forwards alone. `counts`: bool[microbatch], whether its totals count."""

    table: Table
    ends: Ends
    chunks: tuple[Chunks, ...]
    batches: Batch
    contexts: Context
    scales: Totals | None
    counts: Array | None = None

    def play(self, totals: Totals, grads: Sequence[Params], outer: Params) -> tuple[Totals, list[Params], Params]:
        """-> this stage's totals, its gradients by lane, and those of the ends' parameters, each added to those given.

        Gradients are as `zero.scatter` returns them.
        """
        carry = self._start(totals, grads, outer)
        for segment in self.table.segments():
            carry = self._segment(segment, carry)
        found = []
        for lane, chunks in enumerate(self.chunks if self.scales is not None else ()):
            found.append(chunks.flush(carry[f"pending.{lane}"], carry[f"grads.{lane}"]))
        return carry["totals"], found, carry["outer"]

    # -- the ticks --

    def _start(self, totals: Totals, grads: Sequence[Params], outer: Params) -> Carry:
        batch, ctx = self._microbatch(0)
        shape = jax.eval_shape(lambda: self.ends.embed(batch, ctx))
        x = jax.tree.map(lambda s: collectives.vary(jnp.zeros(s.shape, s.dtype)), shape)
        self.ends.check_uses(x, batch, ctx)
        carry: Carry = {"totals": totals, "outer": outer, "inputs": _buffer(x, self.table.sizes["inputs"])}
        for lane, chunks in enumerate(self.chunks):
            carry[f"held.{lane}"] = chunks.weights.hold()
        if self.scales is not None:
            carry["cotangents"] = _buffer(x, self.table.sizes["cotangents"])
            for lane, chunks in enumerate(self.chunks):
                carry[f"saved.{lane}"] = chunks.buffers(self.table.sizes[f"saved.{lane}"], x, ctx)
                carry[f"pending.{lane}"], carry[f"grads.{lane}"] = chunks.pending(), grads[lane]
                if self.table.schedule.split:
                    slots = self.table.sizes[f"between.{lane}"]
                    carry[f"between.{lane}"] = chunks.between_buffers(slots, x, ctx, self.scales)
        for i, slot in enumerate(self.table.schedule.slots):
            if self._stages > 1 and slot.kind == Kind.F:
                carry[f"sent.{i}"] = {step: x for step in self._steps}
            elif slot.kind == Kind.B:
                carry[f"sent.{i}"] = x
        return carry

    def _segment(self, segment: Segment, carry: Carry) -> Carry:
        rows = self._rows(segment)
        if segment.stop - segment.start == 1:
            return self._tick(segment, carry, jax.tree.map(lambda a: a[0], rows))
        return lax.scan(lambda carry, row: (self._tick(segment, carry, row), None), carry, rows)[0]

    def _rows(self, segment: Segment) -> Row:
        def own(column: np.ndarray) -> Array:
            column = column[segment.start : segment.stop]
            if (column == column[:, :1]).all():
                return jnp.asarray(column[:, 0])
            return lax.dynamic_index_in_dim(jnp.asarray(column), collectives.axis_index("pipe"), 1, keepdims=False)

        slots = tuple({f.name: own(getattr(s, f.name)) for f in fields(s)} for s in self.table.slots)
        ends = {f.name: getattr(self.table.ends, f.name) for f in fields(self.table.ends)}
        played = (self.table.played(i) for i in range(len(slots)))
        cut = slice(segment.start, segment.stop)
        return Row(slots, {k: jnp.asarray(v[cut]) for k, v in ends.items()}, tuple(jnp.asarray(p[cut]) for p in played))

    def _tick(self, segment: Segment, carry: Carry, row: Row) -> Carry:
        schedule = self.table.schedule
        carry = self._arrive(segment, row, carry, Kind.F)
        travelling = self._departures(segment, carry)
        first, last = 0, len(self.chunks) - 1
        for i, slot in enumerate(schedule.slots):
            if (slot.kind, slot.lane) == (Kind.F, first):
                carry = self._end(segment, "embed", self._embed, carry, row, ["inputs"])
            when = True if i in segment.always else row.played[i] if i in segment.sometimes else False
            if when is not True and when is not False:
                carry = self._with_now(carry, i)
            if when is not False:
                carry = _maybe(when, partial(self._slot, segment, i, row), carry, self._touched(segment, i))
            if (slot.kind, slot.lane) == (Kind.F, last):
                carry = self._land(segment, i, row, carry, travelling)
                touched = ["totals"] + (["cotangents", "outer"] if self.scales is not None else [])
                carry = self._end(segment, "head", partial(self._head, i), carry, row, touched)
            if (slot.kind, slot.lane) == (Kind.B, first):
                carry = self._end(segment, "unembed", partial(self._unembed, i), carry, row, ["outer"])
        return collectives.vary({name: value for name, value in carry.items() if not name.startswith(_NOW)})

    def _end(
        self, segment: Segment, name: str, play: Callable[..., Carry], carry: Carry, row: Row, touched: list[str]
    ) -> Carry:
        there = getattr(self.table.ends, name)[segment.start : segment.stop] != NONE
        if not there.any():
            return carry
        when = True if there.all() else row.ends[name] != NONE
        return _maybe(when, partial(play, row), carry, touched)

    def _touched(self, segment: Segment, i: int) -> list[str]:
        own, sent = self._changes(i), [f"sent.{i}"] if self._sends(i) else []
        return [*own, *sent, *(self._weights_change(i) if self._fills(segment, i) else [])]

    def _changes(self, i: int) -> list[str]:
        """What a slot's own task changes, but for what it sends."""
        slot = self.table.schedule.slots[i]
        if slot.kind == Kind.W:
            return self._weights_change(i)
        held, now = f"held.{slot.lane}", f"{_NOW}{i}"
        if slot.kind == Kind.F:
            return [held, "totals", "inputs", now, *([f"saved.{slot.lane}"] if self.scales is not None else [])]
        split = self.table.schedule.split
        return [held, "cotangents", now, *([f"between.{slot.lane}"] if split else self._weights_change(i))]

    def _weights_change(self, i: int) -> list[str]:
        lane = self.table.schedule.slots[i].lane
        return [f"pending.{lane}", f"grads.{lane}"]

    def _fills(self, segment: Segment, i: int) -> bool:
        """Whether some stage fills this slot with a W."""
        return bool(self.table.slots[i].fills[segment.start : segment.stop].any())

    def _sends(self, i: int) -> bool:
        return self.table.schedule.slots[i].kind == Kind.B or (
            self._stages > 1 and self.table.schedule.slots[i].kind == Kind.F
        )

    # -- what is played --

    def _slot(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        kind = self.table.schedule.slots[i].kind
        play = partial({Kind.F: self._forward, Kind.B: self._backward, Kind.W: self._weights}[kind], segment, i, row)
        new = self._either(segment, i, row, carry) if self._fills(segment, i) else play(carry)
        if kind == Kind.F and self._sends(i):
            sent = {step: collectives.to_neighbour(new[f"{_NOW}{i}"], step, self._ring) for step in self._steps}
            return new | {f"sent.{i}": sent}
        # What a backward sends leaves when the next tick begins, so that it travels while the next forward runs.
        return new | ({f"sent.{i}": new[f"{_NOW}{i}"]} if kind == Kind.B else {})

    def _either(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        """The slot's own task, or a W on the stages that fill it: nothing in the branches talks to another stage."""
        kind, lane, mine = self.table.schedule.slots[i].kind, self.table.schedule.slots[i].lane, row.slots[i]
        carry, weights = self._with_now(carry, i), self._weights_change(i)
        own = {name: carry[name] for name in (*self._changes(i), *weights)}
        # Of the buffer that the task writes, its slot alone goes through: XLA copies what a branch leaves as it is.
        column, task = ("saved", self._forward) if kind == Kind.F else ("between", self._backward)
        buffer = f"{column}.{lane}"
        own[buffer] = cut(carry[buffer], mine[column])
        alone = replace(row, slots=(*row.slots[:i], mine | {column: jnp.zeros_like(mine[column])}, *row.slots[i + 1 :]))
        new = lax.cond(
            mine["fills"] == 1,
            lambda own: collectives.vary(own | self._weights(segment, i, row, carry | {w: own[w] for w in weights})),
            lambda own: collectives.vary(own | task(segment, i, alone, carry | own)),
            own,
        )
        return new | {buffer: paste(carry[buffer], new[buffer], mine[column])}

    def _with_now(self, carry: Carry, i: int) -> Carry:
        """With something in place of what a slot makes for this tick alone, for branches that do not make it."""
        blank = jax.tree.map(lambda x: collectives.vary(jnp.zeros_like(x[0])), carry["inputs"])
        return {f"{_NOW}{i}": blank} | carry

    def _forward(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        lane, at, mine = self._at(segment, i, row)
        x = _take(carry["inputs"], mine["reads"])
        _, ctx = self._microbatch(mine["microbatch"])
        new: Carry = {}
        if self.scales is None:
            y, new[f"held.{lane}"], totals = self.chunks[lane].evaluate(x, carry[f"held.{lane}"], ctx, at)
        else:
            y, new[f"held.{lane}"], new[f"saved.{lane}"], totals = self.chunks[lane].forward(
                x, carry[f"held.{lane}"], carry[f"saved.{lane}"], ctx, at
            )
        new["totals"] = self._add(carry["totals"], totals, mine["microbatch"])
        new["inputs"] = self._stay(i, carry["inputs"], y, mine)
        new[f"{_NOW}{i}"] = y
        return new

    def _backward(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        lane, at, mine = self._at(segment, i, row)
        dy = _take(carry["cotangents"], mine["reads"])
        _, ctx = self._microbatch(mine["microbatch"])
        chunks, scales = self.chunks[lane], self.scales or {}
        held, saved = carry[f"held.{lane}"], carry[f"saved.{lane}"]
        new: Carry = {}
        if self.table.schedule.split:
            dx, new[f"held.{lane}"], new[f"between.{lane}"] = chunks.input_gradient(
                dy, held, carry[f"between.{lane}"], saved, ctx, scales, at
            )
        else:
            dx, new[f"held.{lane}"], new[f"pending.{lane}"], new[f"grads.{lane}"] = chunks.backward(
                dy, held, carry[f"pending.{lane}"], carry[f"grads.{lane}"], saved, ctx, scales, at
            )
        new["cotangents"] = self._stay(i, carry["cotangents"], dx, mine)
        new[f"{_NOW}{i}"] = dx
        return new

    def _weights(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        lane, at, mine = self._at(segment, i, row)
        _, ctx = self._microbatch(mine["microbatch"])
        if self.table.schedule.slots[i].kind != Kind.W:
            # It fills another kind's slot, in a branch that only stages with a W enter.
            at = replace(at, valid=None)
        pending, grads = self.chunks[lane].weight_gradient(
            carry[f"pending.{lane}"],
            carry[f"grads.{lane}"],
            carry[f"between.{lane}"],
            carry[f"saved.{lane}"],
            ctx,
            self.scales or {},
            at,
        )
        return {f"pending.{lane}": pending, f"grads.{lane}": grads}

    def _embed(self, row: Row, carry: Carry) -> Carry:
        x = self.ends.embed(*self._microbatch(row.ends["embed"]))
        first, _ = self.table.schedule.route[0]
        return {"inputs": _put(carry["inputs"], x, row.ends["embed_slot"], self._on(first))}

    def _head(self, i: int, row: Row, carry: Carry) -> Carry:
        last, _ = self.table.schedule.route[-1]
        x = collectives.vary(collectives.from_stage(carry[f"{_NOW}{i}"], last))
        batch, ctx = self._microbatch(row.ends["head"])
        if self.scales is None:
            return {"totals": self._add(carry["totals"], self._once(self.ends.head(x, batch, ctx)), row.ends["head"])}
        totals, grads, dx = self.ends.head_and_gradients(x, batch, ctx, self.scales)
        return {
            "totals": self._add(carry["totals"], self._once(totals), row.ends["head"]),
            "cotangents": _put(carry["cotangents"], dx, row.ends["head_slot"], self._on(last)),
            "outer": self.ends.accumulate(carry["outer"], grads),
        }

    def _unembed(self, i: int, row: Row, carry: Carry) -> Carry:
        first, _ = self.table.schedule.route[0]
        dx = collectives.vary(collectives.from_stage(carry[f"{_NOW}{i}"], first))
        grads = self.ends.embed_gradients(*self._microbatch(row.ends["unembed"]), dx)
        return {"outer": self.ends.accumulate(carry["outer"], grads)}

    # -- what goes from stage to stage --

    def _arriving(self, segment: Segment, kind: Kind) -> list[int]:
        """The slots of this kind from which something arrives in these ticks."""
        return [
            i
            for i, slot in enumerate(self.table.schedule.slots)
            if slot.kind == kind and (self.table.slots[i].arrives[segment.start : segment.stop] != NONE).any()
        ]

    def _arrive(self, segment: Segment, row: Row, carry: Carry, kind: Kind) -> Carry:
        """Puts what neighbours sent in the tick before where the table says."""
        name = "inputs" if kind == Kind.F else "cotangents"
        for i in self._arriving(segment, kind):
            sent, mine = carry[f"sent.{i}"], row.slots[i]
            # What goes one stage up comes from the stage before.
            got = sent.get(1, sent.get(-1))
            if len(sent) == 2:
                got = _select(mine["from_next"] == 1, sent[-1], sent[1])
            carry = carry | {name: _put(carry[name], got, mine["arrives"], mine["arrives"] != NONE)}
        return carry

    def _departures(self, segment: Segment, carry: Carry) -> Carry:
        """What backwards of the tick before send, on its way: it is not needed before this tick's forward has run."""
        return {
            f"sent.{i}": {
                -step: collectives.to_neighbour(carry[f"sent.{i}"], -step, self._ring) for step in self._steps
            }
            for i in self._arriving(segment, Kind.B)
        }

    def _land(self, segment: Segment, i: int, row: Row, carry: Carry, travelling: Carry) -> Carry:
        """Puts it in place, after the forward in slot `i`. The barrier keeps XLA from starting it only then."""
        now = f"{_NOW}{i}"
        if travelling and now in carry:
            carry[now], travelling = lax.optimization_barrier((carry[now], travelling))
        sent = {name: carry[name] for name in travelling}
        return self._arrive(segment, row, carry | travelling, Kind.B) | sent

    def _stay(self, i: int, buffer: Any, x: Any, mine: Mapping[str, Array]) -> Any:
        if (self.table.slots[i].stays == NONE).all():
            return buffer
        return _put(buffer, x, mine["stays"], mine["stays"] != NONE)

    # -- small things --

    @property
    def _stages(self) -> int:
        return self.table.schedule.stages

    @property
    def _steps(self) -> tuple[int, ...]:
        """The ways in which forwards send."""
        return (1, -1) if self.table.schedule.folded else (1,)

    @property
    def _ring(self) -> bool:
        return self.table.schedule.chunks > 1 and not self.table.schedule.folded

    def _at(self, segment: Segment, i: int, row: Row) -> tuple[int, At, dict[str, Array]]:
        """-> the lane, where the task is played, and this slot's row."""
        lane, mine = self.table.schedule.slots[i].lane, row.slots[i]
        longest, before = self.chunks[lane].longest, self.table.schedule.lanes.index(lane)
        places = {name: jnp.maximum(mine[name] - before, 0) * longest for name in ("chunk", "next_chunk")}
        valid = self.table.slots[i].valid[segment.start : segment.stop]
        at = At(
            first=places["chunk"],
            then=places["next_chunk"] + mine["next_last"] * (longest - 1),
            saved=mine["saved"],
            between=mine["between"],
            valid=None if valid.all() else mine["valid"] == 1,
        )
        return lane, at, mine

    def _microbatch(self, index: Array | int) -> tuple[Batch, Context]:
        pick = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)  # noqa: E731
        return jax.tree.map(pick, (self.batches, self.contexts))

    def _on(self, stage: int) -> Array | None:
        return None if self._stages == 1 else jnp.asarray(collectives.axis_index("pipe") == stage)

    def _once(self, totals: Totals) -> Totals:
        """Of what every stage has computed, one counts."""
        return _select(self._on(0), totals, jax.tree.map(jnp.zeros_like, totals))

    def _add(self, old: Totals, new: Totals, microbatch: Array) -> Totals:
        if self.counts is not None:
            counts = lax.dynamic_index_in_dim(self.counts, microbatch, 0, keepdims=False)
            # `where`, not a product: a row that does not count may hold anything, infinities too.
            new = _select(counts, new, jax.tree.map(jnp.zeros_like, new))
        return collectives.vary(add_totals(old, new))


def _maybe(when: Array | bool, play: Callable[[Carry], Carry], carry: Carry, touched: Sequence[str]) -> Carry:
    """`play` where `when`, which is the same on all stages; nothing but what is `touched` goes through the branch."""
    if when is True:
        return carry | play(carry)
    own = {name: carry[name] for name in touched}
    return carry | lax.cond(when, lambda own: collectives.vary(own | play(carry | own)), lambda own: own, own)


def _buffer(x: Any, slots: int) -> Any:
    return jax.tree.map(lambda a: collectives.vary(jnp.zeros((slots, *a.shape), a.dtype)), x)


def _take(buffer: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b: read(b, slot), buffer)


def _put(buffer: Any, x: Any, slot: Array, valid: Array | None) -> Any:
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(lambda b, new: write(b, _select(valid, new, read(b, slot)), slot), buffer, x)


def _select[T](valid: Array | None, new: T, old: T) -> T:
    return new if valid is None else jax.tree.map(lambda n, o: jnp.where(valid, n, o), new, old)
