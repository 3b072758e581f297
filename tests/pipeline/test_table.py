"""The table that the executor reads: played with symbols, everything is read where it was written, and is still there.

The symbols are named by the place q in the route and the microbatch m: x is what goes into the forward at q, dx what
goes into its backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline import Kind, Schedule, Slot, build, forward, legal_microbatches
from jaxpar.pipeline.table import NONE, Table, lower

NAMED = {
    "gpipe": ("gpipe", 1, False),
    "1f1b": ("1f1b", 1, False),
    "interleaved": ("interleaved", 2, False),
    "zero_bubble": ("zero_bubble", 1, False),
    "zero_bubble, fill": ("zero_bubble", 1, True),
    "zero_bubble_v": ("zero_bubble_v", 1, False),
    "zero_bubble_v, fill": ("zero_bubble_v", 1, True),
}
NOTHING = ("nothing",)
Symbol = tuple[object, ...]


@dataclass
class Stage:
    """The buffers of one stage, by name and slot, and whose weights it has fetched, by lane: (chunk, last layer)."""

    table: Table
    number: int
    now: int = 0
    buffers: dict[str, list[Symbol]] = field(init=False)
    held: dict[int, tuple[int, int]] = field(init=False)
    messages: dict[str, dict[Symbol, list[int]]] = field(init=False)

    def __post_init__(self):
        self.buffers = {name: [NOTHING] * size for name, size in self.table.sizes.items()}
        self.messages = {"inputs": {}, "cotangents": {}}
        lanes = self.table.schedule.lanes
        self.held = {lane: (lanes.index(lane), 0) for lane in lanes}

    def put(self, name: str, slot: int, symbol: Symbol) -> None:
        assert 0 <= slot < len(self.buffers[name]), (name, slot)
        self.buffers[name][slot] = symbol
        if name in self.messages and symbol != NOTHING:
            self.messages[name][symbol] = [self.now]

    def read(self, name: str, slot: int, expected: Symbol) -> None:
        assert self.buffers[name][slot] == expected
        if name in self.messages:
            self.messages[name][expected].append(self.now)

    def play(self, t: int, i: int) -> Symbol:
        """What the stage makes in slot `i` of tick `t`, after the asserts that it reads what it should."""
        slot, row = self.table.schedule.slots[i], self.table.slots[i]
        mine = {name: int(getattr(row, name)[t, self.number]) for name in row.__dataclass_fields__}
        chunk, m = mine["chunk"], mine["microbatch"]
        q = self.table.schedule.place[self.number, chunk]
        saved, between = f"saved.{slot.lane}", f"between.{slot.lane}"
        if mine["fills"] or slot.kind == Kind.W:
            if mine["fills"] or mine["valid"]:
                self.read(between, mine["between"], ("between", q, m))
                self.read(saved, mine["saved"], ("saved", q, m))
            return NOTHING
        made = self._forward(q, m, saved, mine) if slot.kind == Kind.F else self._backward(q, m, saved, between, mine)
        if mine["valid"]:
            assert self.held[slot.lane] == (chunk, int(slot.kind == Kind.B)), "weights fetched ahead"
        first = self.table.schedule.lanes.index(slot.lane)
        self.held[slot.lane] = (max(mine["next_chunk"], first), mine["next_last"])
        return made

    def _forward(self, q: int, m: int, saved: str, mine: dict[str, int]) -> Symbol:
        made = ("x", q + 1, m) if mine["valid"] else NOTHING
        if mine["valid"]:
            self.read("inputs", mine["reads"], ("x", q, m))
        if self.table.sizes[saved]:
            self.put(saved, mine["saved"], ("saved", q, m) if mine["valid"] else NOTHING)
        if mine["stays"] != NONE:
            self.put("inputs", mine["stays"], made)
        return made

    def _backward(self, q: int, m: int, saved: str, between: str, mine: dict[str, int]) -> Symbol:
        made = ("dx", q - 1, m) if mine["valid"] else NOTHING
        if mine["valid"]:
            self.read("cotangents", mine["reads"], ("dx", q, m))
            self.read(saved, mine["saved"], ("saved", q, m))
        if self.table.schedule.split:
            self.put(between, mine["between"], ("between", q, m) if mine["valid"] else NOTHING)
        if mine["stays"] != NONE:
            self.put("cotangents", mine["stays"], made)
        return made


class Symbolic:
    """All stages, tick by tick and slot by slot, as `jaxpar.executor.player` plays a table."""

    def __init__(self, table: Table):
        self.table, self.schedule = table, table.schedule
        self.stages = [Stage(table, s) for s in range(self.schedule.stages)]
        self.sent: dict[int, list[Symbol]] = {}
        self.ends: list[tuple[str, int]] = []

    def run(self) -> "Symbolic":
        slots = self.schedule.slots
        lanes = [slot.lane for slot in slots]
        for t in range(len(self.schedule.ticks)):
            for stage in self.stages:
                stage.now = t
            self._arrive(t, Kind.F)
            # What backwards send arrives after the last forward.
            travelling, made = dict(self.sent), {}
            for i, slot in enumerate(slots):
                if (slot.kind, slot.lane) == (Kind.F, min(lanes)):
                    self._embed(t)
                if self.table.played(i)[t]:
                    made[i] = self.sent[i] = [stage.play(t, i) for stage in self.stages]
                if (slot.kind, slot.lane) == (Kind.F, max(lanes)):
                    self._arrive(t, Kind.B, travelling)
                    self._end(t, "head", made.get(i), len(self.schedule.route))
                if (slot.kind, slot.lane) == (Kind.B, min(lanes)):
                    self._end(t, "unembed", made.get(i), -1)
        return self

    def _arrive(self, t: int, kind: Kind, sent: dict[int, list[Symbol]] | None = None) -> None:
        sent = self.sent if sent is None else sent
        for i, slot in enumerate(self.schedule.slots):
            row = self.table.slots[i]
            for s, stage in enumerate(self.stages):
                if slot.kind == kind and (to := int(row.arrives[t, s])) != NONE:
                    # One way, unless the table says: forwards go up, backwards down.
                    down = kind == Kind.B if not self.schedule.folded else bool(row.from_next[t, s])
                    sender = (s + (1 if down else -1)) % len(self.stages)
                    stage.put("inputs" if kind == Kind.F else "cotangents", to, sent[i][sender])

    def _embed(self, t: int) -> None:
        if (m := int(self.table.ends.embed[t])) != NONE:
            first, _ = self.schedule.route[0]
            self.stages[first].put("inputs", int(self.table.ends.embed_slot[t]), ("x", 0, m))
            self.ends.append(("embed", m))

    def _end(self, t: int, name: str, made: list[Symbol] | None, q: int) -> None:
        """All stages together read what the stage at this end has just made."""
        if (m := int(getattr(self.table.ends, name)[t])) == NONE:
            return
        stage, _ = self.schedule.route[-1 if name == "head" else 0]
        assert made is not None and made[stage] == ("x" if name == "head" else "dx", q, m)
        if name == "head" and Kind.B in self.schedule.kinds:
            self.stages[stage].put("cotangents", int(self.table.ends.head_slot[t]), ("dx", q - 1, m))
        self.ends.append((name, m))


@st.composite
def schedules(draw) -> Schedule:
    """Every named schedule and forward-only ones, with ticks of nothing put in between."""
    name, virtual, fill = draw(st.sampled_from([*NAMED.values(), ("forward", 1, False), ("forward", 3, False)]))
    stages = draw(st.integers(1, 5))
    lanes = draw(st.integers(1, 3)) if name in ("1f1b", "gpipe", "zero_bubble") else 1
    if name == "forward":
        built = forward(stages, draw(st.integers(1, 12)), virtual, folded=virtual == 1 and draw(st.booleans()))
    else:
        least = legal_microbatches(name, stages, virtual, lanes=lanes, fill=fill).start
        built = build(name, stages, draw(st.integers(least, least + 11)), virtual, lanes=lanes, fill=fill)
    ticks = list(built.ticks)
    empty = ((None,) * len(built.slots),) * stages
    for place in draw(st.lists(st.integers(0, len(ticks)), max_size=3)):
        ticks.insert(place, empty)
    stretched = replace(built, ticks=tuple(ticks))
    stretched.validate()
    return stretched


@given(schedules())
def test_every_task_finds_its_own_data_where_the_table_says(schedule):
    """Otherwise a stage would compute with another microbatch's activations, or with what was overwritten."""
    played = Symbolic(lower(schedule)).run()
    names = ["embed", "head"] + (["unembed"] if Kind.B in schedule.kinds else [])
    assert sorted(played.ends) == sorted((name, m) for name in names for m in range(schedule.microbatches))


@given(schedules())
def test_the_table_plays_the_tasks_of_the_schedule(schedule):
    """Otherwise a task would be left out, and what was read would be right all the same."""
    table = lower(schedule)
    found = {}
    for i, (slot, row) in enumerate(zip(schedule.slots, table.slots, strict=True)):
        for t, s in zip(*(row.valid | row.fills).nonzero(), strict=True):
            kind = Kind.W if row.fills[t, s] else slot.kind
            found[int(t), int(s), i] = (kind, int(row.microbatch[t, s]), int(row.chunk[t, s]))
    assert found == {(t, s, i): (task.kind, task.microbatch, task.chunk) for t, s, i, task in schedule.entries()}


@given(schedules())
def test_segments_are_all_ticks_once_and_say_which_slots_are_played(schedule):
    """Otherwise ticks would be left out or played twice, or a slot in which a stage has a task would not be run."""
    table = lower(schedule)
    segments = table.segments()
    assert [t for segment in segments for t in range(segment.start, segment.stop)] == [*range(len(schedule.ticks))]
    for segment in segments:
        for i in range(len(schedule.slots)):
            tasks = [any(row[i] for row in schedule.ticks[t]) for t in range(segment.start, segment.stop)]
            assert (i in segment.always, i in segment.sometimes) == (all(tasks), any(tasks) and not all(tasks))
            if i in segment.sometimes:
                # Before its first task and after its last a slot costs not even a condition.
                there = [t for t, tick in enumerate(schedule.ticks) if any(row[i] for row in tick)]
                assert there[0] <= segment.start and segment.stop <= there[-1] + 1


@pytest.mark.parametrize("name", NAMED)
def test_the_program_does_not_grow_with_the_microbatches(name):
    """Otherwise compile time would: each segment is one loop."""
    schedule, virtual, fill = NAMED[name]
    for p in (2, 4, 8):
        counts = {len(lower(build(schedule, p, m, virtual, fill=fill)).segments()) for m in (3 * p, 4 * p, 12 * p)}
        assert len(counts) == 1


@given(schedules())
def test_buffers_hold_what_is_alive_at_once_and_nowhere_more_than_one_to_throw_away(schedule):
    """Otherwise the executor would allocate more than `peak_live` promises: one slot more where a stage that waits
    must write somewhere while all are in use."""
    if Kind.B not in schedule.kinds:
        return
    sizes = lower(schedule).sizes
    for lane in set(schedule.lanes):
        last = schedule.kinds[-1]
        assert sizes[f"saved.{lane}"] == slots_needed(schedule, lane, Kind.F, last)
        assert sizes[f"between.{lane}"] == (slots_needed(schedule, lane, Kind.B, last) if schedule.split else 0)


def slots_needed(schedule: Schedule, lane: int, first: Kind, last: Kind) -> int:
    """Counted tick by tick: what is alive, and one more where a stage waits in the slot of `first`."""
    when, most = schedule.when(), 0
    i = schedule.slots.index(Slot(first, lane))
    for s in range(schedule.stages):
        spans = [
            (t, when[s, replace(task, kind=last)][0])
            for (stage, task), (t, _) in when.items()
            if stage == s and task.kind == first and schedule.lanes[task.chunk] == lane
        ]
        for t, tick in enumerate(schedule.ticks):
            waits = tick[s][i] is None and any(entries[i] is not None for entries in tick)
            most = max(most, waits + alive(spans, t))
    return most


def alive(spans: Iterable[tuple[int, int]], t: int) -> int:
    return sum(start <= t <= end for start, end in spans)


@given(schedules())
def test_messages_take_no_more_room_than_they_wait(schedule):
    """Otherwise a stage would keep room for activations that have been read, or have not arrived."""
    table = lower(schedule)
    for name in ("inputs", "cotangents"):
        most = 0
        for stage in Symbolic(table).run().stages:
            spans = [(min(ticks), max(ticks)) for ticks in stage.messages[name].values()]
            most = max([most, *(alive(spans, t) for t in range(len(schedule.ticks)))])
        assert table.sizes[name] == most


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_saved_slots_are_the_peak_that_the_schedule_promises(name, p):
    """Otherwise `jaxpar timeline` would promise less memory than a stage takes."""
    schedule, virtual, fill = NAMED[name]
    built = build(schedule, p, 4 * p, virtual, fill=fill)
    sizes = lower(built).sizes
    assert sizes["saved.0"] - max(built.peak_live()) in (0, 1)
    assert sizes["between.0"] - max(built.peak_pending()) in (0, 1)
    if schedule in ("gpipe", "1f1b", "interleaved"):
        assert (sizes["saved.0"] == max(built.peak_live())) == (schedule != "gpipe")
