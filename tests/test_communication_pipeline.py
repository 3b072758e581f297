"""The communication of a pipeline is what its schedule and its ends promise: permutes by tick, sums by microbatch.

Letters: p stages, m microbatches, A bytes of one microbatch's activations on one device, in the compute dtype. Counts
are as the compiled program has them: an end whose tick is under a condition counts in every tick of its loop. How often
it really runs, m times, the table says.
"""

import re
from dataclasses import dataclass

import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.estimate.compile import StepReport, report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.hlo_text import Instruction, Module, parse_module
from jaxpar.estimate.topology import compiler_options, topology_devices
from jaxpar.pipeline import Kind, Slot, build
from jaxpar.pipeline.table import NONE, Segment, Table, lower
from jaxpar.placement import Placement
from jaxpar.run import Run
from models.llama import LlamaConfig

FLOAT, BF16 = 4, 2
SMALL = LlamaConfig(64, 8, 32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)
LARGE = LlamaConfig(1024, 16, 512, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1024)
SCHEDULES = {
    "gpipe": dict(pipeline="gpipe"),
    "1f1b": dict(pipeline="1f1b"),
    "interleaved": dict(pipeline="interleaved", virtual_stages=2),
    "zero_bubble": dict(pipeline="zero_bubble"),
    "zero_bubble, fill": dict(pipeline="zero_bubble", fill=True),
    "zero_bubble_v": dict(pipeline="zero_bubble_v"),
    "zero_bubble_v, fill": dict(pipeline="zero_bubble_v", fill=True),
}
# The loss, the weights of terms, the gradient norm: scalars that XLA may merge into one another or into a larger sum.
SCALARS = 128


@dataclass(frozen=True)
class Compiled:
    run: Run
    step: StepReport
    module: Module
    table: Table
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device."""
        shape = self.run.plan.shape
        return self.rows // shape.data // self.run.plan.microbatches * self.length

    def over(self, axis: str, kind: str) -> list[tuple[int, int]]:
        """`(executions, bytes of one)` of each collective of this kind."""
        return [(c.executions, c.bytes) for c in self.step.collectives if axis in c.axes and c.kind == kind]


def compiled(plan: jaxpar.Plan, cluster: str, config: LlamaConfig = SMALL, length: int = 16) -> Compiled:
    where = Cluster.parse(cluster)
    run = jaxpar.Program(config.build, optax.sgd(0.1), plan).on(topology_devices(where), where.devices_per_node)
    rows = plan.shape.data * plan.microbatches * 2
    lowered = run.lower(jaxpar.token_shapes(rows, length))
    program = lowered.compile(compiler_options=compiler_options(run.mesh.devices.flat[0].platform))
    table = lower(plan.schedule(plan.shape.pipe))
    return Compiled(run, report(program, run.mesh), parse_module(program.as_text() or ""), table, rows, length)


def ticks(segment: Segment) -> int:
    return segment.stop - segment.start


def runs(table: Table, kind: Kind) -> int:
    """In how many ticks the program runs the slot of this kind; a W also in the slots that are filled with W."""
    found = 0
    for segment in table.segments():
        for i, slot in enumerate(table.schedule.slots):
            own = slot.kind == kind and i in segment.always | segment.sometimes
            fills = kind == Kind.W and table.slots[i].fills[segment.start : segment.stop].any()
            found += ticks(segment) * (own + bool(fills))
    return found


def permutes(table: Table) -> int:
    """Forwards send in every tick that plays F, but for a last one outside a loop; backwards in every tick of a loop in
    which one arrives."""
    found, segments = 0, table.segments()
    for segment, then in zip(segments, [*segments[1:], None], strict=True):
        for i, slot in enumerate(table.schedule.slots):
            arrives = (table.slots[i].arrives != NONE).any(axis=1)
            played = slot.kind == Kind.F and i in segment.always | segment.sometimes
            needed = ticks(segment) > 1 or (then is not None and arrives[then.start : then.stop].any())
            backward = slot.kind == Kind.B and arrives[segment.start : segment.stop].any()
            found += ticks(segment) * bool((played and needed) or backward)
    return found * (2 if table.schedule.folded else 1)


def in_loops_with(table: Table, end: str) -> int:
    """Ticks of the loops in which an end is played at all."""
    column = getattr(table.ends, end)
    return sum(ticks(s) for s in table.segments() if (column[s.start : s.stop] != NONE).any())


def summed_bytes(c: Compiled, embed_dim: int) -> int:
    """Over `pipe`, in float32. Embedding: the stages' parts of the lookup, and the gradient of its result. Head: its
    input, the gradient of that, and the largest logit, the exponentials and the target's logit of each token. Once:
    the gradient of the last norm, which no vocabulary shares out."""
    activations = c.tokens * embed_dim * FLOAT
    embedding = (in_loops_with(c.table, "embed") + in_loops_with(c.table, "unembed")) * activations
    head = in_loops_with(c.table, "head") * (2 * activations + 3 * c.tokens * FLOAT)
    return embedding + head + embed_dim * FLOAT


def assert_promised_over_pipe(c: Compiled, embed_dim: int, activation: int) -> None:
    assert {x.kind for x in c.step.collectives if "pipe" in x.axes} == {"collective-permute", "all-reduce"}
    sends = c.over("pipe", "collective-permute")
    assert {size for _, size in sends} == {activation}
    assert sum(n for n, _ in sends) == permutes(c.table)
    found = sum(n * size for n, size in c.over("pipe", "all-reduce"))
    assert 0 <= found - summed_bytes(c, embed_dim) <= SCALARS
    ends = [c.table.ends.embed, c.table.ends.head, c.table.ends.unembed]
    assert [int((end != NONE).sum()) for end in ends] == [c.run.plan.microbatches] * 3


def test_slots_run_as_often_as_the_page_on_pipelines_says():
    """Otherwise docs/pipelines.md would tell other counts than the formulas here, which the programs bear out."""
    for p, m in ((2, 8), (4, 8), (4, 32), (8, 16)):
        for name, times in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_v", 2)):
            table = lower(build(name, p, m, 2 if name == "interleaved" else 1))
            fill = times * (p - 1) if table.schedule.folded else p - 1
            assert runs(table, Kind.F) == runs(table, Kind.B) == times * m + fill
            if table.schedule.split:
                i = table.schedule.slots.index(Slot(Kind.W))
                assert table.played(i).sum() == times * m
            if name in ("1f1b", "gpipe"):
                assert permutes(table) == 2 * (m + p - 1)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "data=2,pipe=4") for name in SCHEDULES),
        *((name, "data=2,pipe=2,tensor=2") for name in ("1f1b", "zero_bubble_v, fill")),
    ],
)
def test_stages_send_and_sum_what_the_schedule_says(name, mesh):
    """Otherwise a schedule costs more of the network than is told, or waits for what nobody needs."""
    c = compiled(jaxpar.Plan(mesh, microbatches=8, **SCHEDULES[name]), "1x8xcpu")
    assert_promised_over_pipe(c, SMALL.embed_dim, c.tokens * SMALL.embed_dim * FLOAT)


@pytest.mark.parametrize(
    ("zero", "name"),
    [(0, "1f1b"), (1, "1f1b"), (2, "1f1b"), (3, "1f1b"), (3, "interleaved"), (3, "zero_bubble, fill")],
)
def test_zero_gathers_and_scatters_in_every_tick_that_needs_it(zero, name):
    """Otherwise what ZeRO costs in a pipeline would be other than docs/pipelines.md says."""
    plan = jaxpar.Plan("data=4,pipe=2", zero=zero, microbatches=8, **SCHEDULES[name])
    c = compiled(plan, "1x8xcpu")
    matrices = [p for p in c.run.placements.values() if len(p.padded) > 1]
    found, promised = matrix_bytes(c), promised_bytes(c, matrices)
    merged = found.get("all-reduce", 0) - promised.get("all-reduce", 0)
    assert 0 <= merged <= SMALL.embed_dim * FLOAT
    assert found == promised | ({"all-reduce": promised["all-reduce"] + merged} if merged else {})


def matrix_bytes(c: Compiled) -> dict[str, int]:
    """Over `data`, by kind, all but single norms and scalars: those XLA merges, or leaves out where they are unused."""
    found: dict[str, int] = {}
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        if moved := sum(n * size for n, size in c.over("data", kind) if size > SMALL.embed_dim * FLOAT):
            found[kind] = moved
    return found


def promised_bytes(c: Compiled, matrices: list[Placement]) -> dict[str, int]:
    table, p = c.table, c.run.plan.shape.pipe
    layer = sum(FLOAT * int(np.prod(x.padded)) for x in matrices if x.info.stack)
    layers = next(x.layers for x in matrices if x.layers)
    # Each stage has its slice of the vocabulary.
    outer = {end: FLOAT * int(np.prod(x.padded)) // p for end, x in zip(("unembed", "head"), _ends(c), strict=True)}
    norms = sum(FLOAT * int(np.prod(x.padded)) for x in c.run.placements.values() if x.info.stack) - layer
    once = layers.chunks * layers.longest * (layer + norms) + sum(outer.values())
    backwards = runs(table, Kind.W if table.schedule.split else Kind.B)
    # A gradient returns a layer behind, so that the first to return is one of zeros; weights come a layer ahead.
    scattered = (backwards * layers.longest + 1) * layer
    scattered += sum(in_loops_with(table, end) * size for end, size in outer.items())
    fetched = (runs(table, Kind.F) + runs(table, Kind.B)) * layers.longest + 1
    return {
        0: {"all-reduce": once},
        1: {"reduce-scatter": once, "all-gather": once},
        2: {"reduce-scatter": scattered, "all-gather": once},
        3: {"reduce-scatter": scattered, "all-gather": fetched * layer + sum(outer.values())},
    }[c.run.plan.zero]


def _ends(c: Compiled) -> tuple[Placement, Placement]:
    return c.run.placements["embedding"], c.run.placements["unembedding"]


@pytest.mark.parametrize(
    ("cluster", "mesh", "name"),
    [
        ("8x8xh100", "data=4,pipe=4,tensor=4", "1f1b"),
        ("8x8xh100", "data=4,pipe=4,tensor=4", "zero_bubble, fill"),
        ("128x8xh100", "data=32,pipe=8,tensor=4", "1f1b"),
    ],
)
def test_a_cluster_of_gpus_sends_to_neighbours_behind_matmuls_and_copies_no_buffer(cluster, mesh, name):
    """Otherwise a pipeline waits for its links in every tick, or moves its saved activations about in memory."""
    plan = jaxpar.Plan(mesh, microbatches=16, precision="bfloat16", remat="full", **SCHEDULES[name])
    c = compiled(plan, cluster, LARGE, 512)
    activation = c.tokens * LARGE.embed_dim * BF16
    assert_promised_over_pipe(c, LARGE.embed_dim, activation)
    assert neighbour_distances(c) <= ({1} if plan.virtual_stages == 1 else {1, plan.shape.pipe - 1})

    steady = max(ticks(segment) for segment in c.table.segments())
    sends = [x for x in c.step.collectives if x.kind == "collective-permute" and x.executions == steady]
    assert len(sends) >= 2
    assert [x for x in sends if not (x.asynchronous and x.overlaps_dot)] == []

    # What one slot holds may be copied, a buffer of several not.
    several = {size for size in c.table.sizes.values() if size > 1}
    copied = [i.leaves[0] for i in in_loops(c.module) if i.base == "copy" and i.leaves[0].nbytes > activation]
    assert [leaf for leaf in copied if leaf.dims[0] in several] == []


def neighbour_distances(c: Compiled) -> set[int]:
    """How many stages apart those are that a permute joins; they differ in nothing else."""
    shape, found = tuple(c.run.mesh.shape.values()), set()
    pipe = list(c.run.mesh.shape).index("pipe")
    for at in (i for computation in c.module.computations.values() for i in computation.instructions.values()):
        if at.base == "collective-permute" and not at.finishes:
            pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", at.attributes)
            assert pairs is not None
            for source, target in re.findall(r"(\d+),(\d+)", pairs.group(1)):
                apart = np.subtract(np.unravel_index(int(target), shape), np.unravel_index(int(source), shape))
                assert np.count_nonzero(apart) == 1
                found.add(abs(int(apart[pipe])))
    return found


def in_loops(module: Module) -> list[Instruction]:
    """What runs inside a loop, fused or not."""
    found: dict[str, list[Instruction]] = {}

    def walk(name: str, inside: bool) -> None:
        instructions = list(module.computations[name].instructions.values())
        if inside and name in found:
            return
        if inside:
            found[name] = instructions
        for at in instructions:
            if at.opcode == "while":
                walk(at.attribute("body"), True)
            else:
                for called in (*at.callees, *at.branches):
                    walk(called, inside)

    walk(module.entry, False)
    return [at for instructions in found.values() for at in instructions]
