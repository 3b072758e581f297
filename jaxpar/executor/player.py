"""Plays a schedule on one stage: forwards, heads, backwards and weights' parts, tick by tick, from its table.

All stages run the same program. A slot that any stage plays is run by all of them; where a stage has no task, what it
computes is masked. Ticks that play the same slots are one `lax.scan`, so that the program does not grow with the
microbatches. Without a pipeline this is the schedule of one stage: a forward and a backward in every tick.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar import collectives
from jaxpar.executor.buffers import cut, empty, masked, paste, put, take
from jaxpar.executor.chunks import At, Chunks
from jaxpar.executor.ends import Batch, Ends, add_totals
from jaxpar.executor.layer import Totals
from jaxpar.executor.rows import Row, stage_rows
from jaxpar.executor.travel import Carry, Travel
from jaxpar.model import Context
from jaxpar.pipeline.schedule import Kind, Slot
from jaxpar.pipeline.table import NONE, Segment, Table
from jaxpar.structure import Params

# Names in the carry that start so end with the tick.
_NOW = "now."


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
        carry: Carry = {"totals": totals, "outer": outer, "inputs": empty(x, self.table.sizes["inputs"])}
        for lane, chunks in enumerate(self.chunks):
            carry[f"held.{lane}"] = chunks.weights.hold()
        if self.scales is not None:
            carry["cotangents"] = empty(x, self.table.sizes["cotangents"])
            for lane, chunks in enumerate(self.chunks):
                carry[f"saved.{lane}"] = chunks.buffers(self.table.sizes[f"saved.{lane}"], x, ctx)
                carry[f"pending.{lane}"], carry[f"grads.{lane}"] = chunks.pending(), grads[lane]
                if self.table.schedule.split:
                    slots = self.table.sizes[f"between.{lane}"]
                    carry[f"between.{lane}"] = chunks.between_buffers(slots, x, ctx, self.scales)
        for i, slot in enumerate(self.table.schedule.slots):
            if self._stages > 1 and slot.kind == Kind.F:
                carry[f"sent.{i}"] = {step: x for step in self._travel.steps}
            elif slot.kind == Kind.B:
                carry[f"sent.{i}"] = x
        return carry

    def _segment(self, segment: Segment, carry: Carry) -> Carry:
        rows = stage_rows(self.table, segment)
        if segment.stop - segment.start == 1:
            return self._tick(segment, carry, jax.tree.map(lambda a: a[0], rows))
        return lax.scan(lambda carry, row: (self._tick(segment, carry, row), None), carry, rows)[0]

    def _tick(self, segment: Segment, carry: Carry, row: Row) -> Carry:
        schedule = self.table.schedule
        first, last = 0, len(self.chunks) - 1
        after = schedule.slots.index(Slot(Kind.F, last))
        carry = self._travel.arrive(segment, row, carry, Kind.F)
        travelling = self._travel.depart(segment, carry)
        if any(slot.kind == Kind.B for slot in schedule.slots[:after]):
            carry, travelling = self._travel.land(segment, row, carry, travelling, None), {}
        for i, slot in enumerate(schedule.slots):
            if (slot.kind, slot.lane) == (Kind.F, first):
                carry = self._end(segment, "embed", self._embed, carry, row, ["inputs"])
            when = True if i in segment.always else row.played[i] if i in segment.sometimes else False
            if when is not True and when is not False:
                carry = self._with_now(carry, i)
            if when is not False:
                carry = _maybe(when, partial(self._slot, segment, i, row), carry, self._touched(segment, i))
            if (slot.kind, slot.lane) == (Kind.F, last):
                carry = self._travel.land(segment, row, carry, travelling, f"{_NOW}{i}")
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
            return new | {f"sent.{i}": self._travel.send(new[f"{_NOW}{i}"])}
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
        # In host memory the whole goes: it would be cut there, slowly.
        whole = kind == Kind.F and self.chunks[lane].gradient.offloads
        alone = row
        if not whole:
            own[buffer] = cut(carry[buffer], mine[column])
            first = mine | {column: jnp.zeros_like(mine[column])}
            alone = replace(row, slots=(*row.slots[:i], first, *row.slots[i + 1 :]))
        new = lax.cond(
            mine["fills"] == 1,
            lambda own: collectives.vary(own | self._weights(segment, i, row, carry | {w: own[w] for w in weights})),
            lambda own: collectives.vary(own | task(segment, i, alone, carry | own)),
            own,
        )
        return new if whole else new | {buffer: paste(carry[buffer], new[buffer], mine[column])}

    def _with_now(self, carry: Carry, i: int) -> Carry:
        """With something in place of what a slot makes for this tick alone, for branches that do not make it."""
        blank = jax.tree.map(lambda x: collectives.vary(jnp.zeros_like(x[0])), carry["inputs"])
        return {f"{_NOW}{i}": blank} | carry

    def _forward(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        lane, at, mine = self._at(segment, i, row)
        x = take(carry["inputs"], mine["reads"])
        _, ctx = self._microbatch(mine["microbatch"])
        new: Carry = {}
        if self.scales is None:
            y, new[f"held.{lane}"], totals = self.chunks[lane].evaluate(x, carry[f"held.{lane}"], ctx, at)
        else:
            y, new[f"held.{lane}"], new[f"saved.{lane}"], totals = self.chunks[lane].forward(
                x, carry[f"held.{lane}"], carry[f"saved.{lane}"], ctx, at
            )
        new["totals"] = self._add(carry["totals"], totals, mine["microbatch"])
        new["inputs"] = self._travel.stay(i, carry["inputs"], y, mine)
        new[f"{_NOW}{i}"] = y
        return new

    def _backward(self, segment: Segment, i: int, row: Row, carry: Carry) -> Carry:
        lane, at, mine = self._at(segment, i, row)
        dy = take(carry["cotangents"], mine["reads"])
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
        new["cotangents"] = self._travel.stay(i, carry["cotangents"], dx, mine)
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
        return {"inputs": put(carry["inputs"], x, row.ends["embed_slot"], self._on(first))}

    def _head(self, i: int, row: Row, carry: Carry) -> Carry:
        last, _ = self.table.schedule.route[-1]
        x = collectives.vary(collectives.from_stage(carry[f"{_NOW}{i}"], last))
        batch, ctx = self._microbatch(row.ends["head"])
        if self.scales is None:
            return {"totals": self._add(carry["totals"], self._once(self.ends.head(x, batch, ctx)), row.ends["head"])}
        totals, grads, dx = self.ends.head_and_gradients(x, batch, ctx, self.scales)
        dx, outer = lax.optimization_barrier((dx, self.ends.accumulate(carry["outer"], grads)))
        return {
            "totals": self._add(carry["totals"], self._once(totals), row.ends["head"]),
            "cotangents": put(carry["cotangents"], dx, row.ends["head_slot"], self._on(last)),
            "outer": outer,
        }

    def _unembed(self, i: int, row: Row, carry: Carry) -> Carry:
        first, _ = self.table.schedule.route[0]
        dx = collectives.vary(collectives.from_stage(carry[f"{_NOW}{i}"], first))
        grads = self.ends.embed_gradients(*self._microbatch(row.ends["unembed"]), dx)
        return {"outer": self.ends.accumulate(carry["outer"], grads)}

    # -- small things --

    @property
    def _stages(self) -> int:
        return self.table.schedule.stages

    @cached_property
    def _travel(self) -> Travel:
        return Travel(self.table)

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
        def pick(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)

        return jax.tree.map(pick, (self.batches, self.contexts))

    def _on(self, stage: int) -> Array | None:
        return None if self._stages == 1 else jnp.asarray(collectives.axis_index("pipe") == stage)

    def _once(self, totals: Totals) -> Totals:
        """Of what every stage has computed, one counts."""
        return masked(self._on(0), totals)

    def _add(self, old: Totals, new: Totals, microbatch: Array) -> Totals:
        if self.counts is not None:
            counts = lax.dynamic_index_in_dim(self.counts, microbatch, 0, keepdims=False)
            # `where`, not a product: a row that does not count may hold anything, infinities too.
            new = masked(counts, new)
        return collectives.vary(add_totals(old, new))


def _maybe(when: Array | bool, play: Callable[[Carry], Carry], carry: Carry, touched: Sequence[str]) -> Carry:
    """`play` where `when`, which is the same on all stages; nothing but what is `touched` goes through the branch."""
    if when is True:
        return carry | play(carry)
    own = {name: carry[name] for name in touched}
    return carry | lax.cond(when, lambda own: collectives.vary(own | play(carry | own)), lambda own: own, own)
