"""What a compiled program does: which collectives it executes over which mesh axes, and how many dot FLOPs.

Counts are executions, not lines: the walk starts at ENTRY and multiplies by the trip counts of the loops
around, so that peeled iterations, hoisted and combined collectives count as what they are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxpar.errors import BackendError
from jaxpar.estimate import dots, loops
from jaxpar.estimate.hlo_text import Computation, Instruction, Leaf, Module, parse_module
from jaxpar.estimate.origin import Origins
from jaxpar.estimate.replica_groups import Axes, collective_axes
from jaxpar.estimate.source_lines import Frame, SourceLines

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
Totals = dict[tuple[tuple[str, ...], str], tuple[int, int]]


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    `axes`: mesh axes, in mesh order; () for groups of one device. See `collective_axes` for parts of an axis.
    `bytes`: payload of one execution on one device, of the larger side: what an all-gather gives, what the
    others take.
    `executions`: per step; an upper bound when `conditional`, inside a branch that only the run chooses.
    `asynchronous`: XLA split it into start and done. Only `overlaps_dot` says that a dot stands between the
    two.
    `loop_depth`: the number of loops around it.
    `frames`: the source lines it comes from, innermost first.
    `generated`: XLA's partitioner put it there, because of how arrays lie; else it was written as a collective.
    `parameters`: of each array that it moves, the path of the model's parameter that it is a piece of; '' of others.
    `leaves`, `dim`: the arrays of its result, and which dim of theirs an all-gather concatenates.
    """

    axes: tuple[str, ...]
    kind: str
    executions: int
    bytes: int
    asynchronous: bool
    op_name: str
    loop_depth: int = 0
    overlaps_dot: bool = False
    conditional: bool = False
    frames: tuple[Frame, ...] = ()
    generated: bool = False
    parameters: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    dim: int = 0

    def parts(self) -> "Iterator[Collective]":
        """XLA combines collectives: one for each array that this one moves."""
        if len(self.leaves) != len(self.parameters):
            yield self
            return
        for leaf, path in zip(self.leaves, self.parameters, strict=True):
            yield replace(self, leaves=(leaf,), parameters=(path,), bytes=leaf.nbytes)

    @property
    def axis(self) -> str:
        """`axes` in one word: `data`, or `data,tensor`."""
        return ",".join(self.axes)


@dataclass(frozen=True)
class HloReport:
    """`dot_flops`: per device and step, executed, dearest branch of a conditional.

    `unknown_loops`: loops with work or collectives in them whose trip count only the run can tell; their
    bodies are counted once. `opaque_calls`: targets of kernels whose FLOPs the text does not show; they count
    as 0.
    """

    collectives: tuple[Collective, ...] = ()
    dot_flops: float = 0.0
    unknown_loops: tuple[str, ...] = ()
    opaque_calls: tuple[str, ...] = ()

    def totals(self, *, singletons: bool = False) -> Totals:
        """{(mesh axes, kind): (executions, bytes)}; groups of one device only when asked for."""
        return totals(self.collectives, singletons=singletons)


def totals(collectives: tuple[Collective, ...], *, singletons: bool = False) -> Totals:
    table: Totals = {}
    for c in collectives:
        if c.axes or singletons:
            executions, size = table.get((c.axes, c.kind), (0, 0))
            table[c.axes, c.kind] = executions + c.executions, size + c.executions * c.bytes
    return table


def read_hlo(text: str, mesh_axes: Mapping[str, int]) -> HloReport:
    """Reads `compiled.as_text()` of a program for one mesh.

    mesh_axes: name -> size in the mesh's order (`mesh.shape`); device i of the program is the mesh's i-th,
    flattened. Raises BackendError when the program is for another number of devices, ValueError when the text
    is no HLO module.
    """
    return read_module(parse_module(text), mesh_axes)


def read_module(module: Module, mesh_axes: Mapping[str, int]) -> HloReport:
    """The same of a module that is parsed already."""
    devices = 1
    for size in mesh_axes.values():
        devices *= size
    if module.partitions != devices:
        raise BackendError(
            f"the compiled program runs on {module.partitions} devices, the mesh {dict(mesh_axes)} has "
            f"{devices}: pass the mesh whose shardings the program was lowered with"
        )
    return _Walk(module, tuple(mesh_axes.items())).computation(module.entry)


class _Walk:
    """Sums a module up, one computation at a time; each is read once however often it is called."""

    def __init__(self, module: Module, axes: Axes):
        self.module, self.axes = module, axes
        self.known: dict[str, HloReport] = {}
        self.origins, self.lines = Origins(module), SourceLines(module.tables)

    def computation(self, name: str) -> HloReport:
        if name not in self.known:
            computation = self.module.computations[name]
            reports = {i.name: self.instruction(computation, i) for i in computation.instructions.values()}
            _mark_started(computation, reports)
            self.known[name] = _sum(reports.values())
        return self.known[name]

    def instruction(self, computation: Computation, at: Instruction) -> HloReport:
        if at.finishes:
            return HloReport()  # counted where it started
        if at.base in KINDS:
            return HloReport(collectives=(self.collective(computation, at),))
        if at.opcode == "while":
            return self.loop(computation, at)
        if at.opcode == "conditional":
            return _dearest([self.computation(branch) for branch in at.branches])
        inside = _sum(self.computation(callee) for callee in at.callees)
        target = None if at.callees else dots.opaque_target(at)
        own = HloReport(dot_flops=dots.flops(computation, at), opaque_calls=(target,) if target else ())
        return _sum([own, inside])

    def collective(self, computation: Computation, at: Instruction) -> Collective:
        axes, group_size = collective_axes(at.attributes, self.axes)
        operands = [operand.name for operand in computation.operands(at)]
        return Collective(
            axes,
            at.base,
            1,
            _payload(computation, at, group_size),
            asynchronous=False,
            op_name=at.op_name,
            frames=self.lines.frames(at.attributes),
            generated=_generated(at),
            parameters=tuple(",".join(self.origins.parameters(computation.name, n)) for n in operands),
            leaves=at.leaves[len(operands) : 2 * len(operands)] if at.starts and at.base in _GIVE_BACK else at.leaves,
            dim=next(iter(at.numbers("dimensions")), 0),
        )

    def loop(self, computation: Computation, at: Instruction) -> HloReport:
        body = self.computation(at.attribute("body"))
        condition = self.computation(at.attribute("condition"))
        trips = loops.trip_count(self.module, computation, at)
        if trips is not None:  # the condition compares a counter: no work of its own
            return _repeat(body, trips)
        once = _repeat(_sum([body, condition]), 1)
        unknown = (at.name,) if once.collectives or once.dot_flops else ()
        return replace(once, unknown_loops=once.unknown_loops + unknown)


# Whose `-start` results in its operands as well, in front.
_GIVE_BACK = ("all-gather", "collective-permute")

# How jax names the collectives that a program writes; all others come from the partitioner.
# Combined ones are named `(.../all_gather:all_gather)`.
_NAME = r"(?:psum|pmax|pmin|ppermute|all_gather|reduce_scatter|all_to_all|ragged_all_to_all)\w*"
_WRITTEN = re.compile(rf"(?:^|[/(]){_NAME}(?::{_NAME})*\)?$")


def _payload(computation: Computation, at: Instruction, group_size: int) -> int:
    """Of a ragged exchange at most that: the rows alone travel, not where they land, nor how many there are."""
    if at.base == "ragged-all-to-all":
        return sum(leaf.nbytes for leaf in next(iter(computation.operands(at))).leaves)
    return computation.operand_bytes(at) * (group_size if at.base == "all-gather" else 1)


def _generated(at: Instruction) -> bool:
    return 'is_spmd_generated="true"' in at.attributes or not _WRITTEN.search(at.op_name)


def _mark_started(computation: Computation, reports: dict[str, HloReport]) -> None:
    """Marks what a `-start` begins as asynchronous, and whether a dot is scheduled before its done."""
    for start in computation.instructions.values():
        if start.starts and reports[start.name].collectives:
            overlaps = _works_before_done(computation, reports, start)
            reports[start.name] = _map(reports[start.name], asynchronous=True, overlaps_dot=overlaps)


def _works_before_done(computation: Computation, reports: dict[str, HloReport], start: Instruction) -> bool:
    after = iter(computation.instructions.values())
    for instruction in after:
        if instruction is start:
            break
    flight = {start.name}
    for instruction in after:
        if instruction.finishes and flight & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return False
            flight.add(instruction.name)
        elif reports[instruction.name].dot_flops:
            return True
    return False


def _repeat(report: HloReport, times: int) -> HloReport:
    if times == 0:
        return HloReport()
    inside = (replace(c, executions=c.executions * times, loop_depth=c.loop_depth + 1) for c in report.collectives)
    return replace(report, collectives=tuple(inside), dot_flops=report.dot_flops * times)


def _dearest(branches: list[HloReport]) -> HloReport:
    """An upper bound for the one branch that runs: for each kind and axes the branch that moves most."""
    moved = [totals(b.collectives, singletons=True) for b in branches]
    kept: tuple[Collective, ...] = ()
    for key in dict.fromkeys(key for table in moved for key in table):
        worst = max(range(len(branches)), key=lambda i: moved[i].get(key, (0, 0))[::-1])
        kept += tuple(c for c in branches[worst].collectives if (c.axes, c.kind) == key)
    dearest = max((b.dot_flops for b in branches), default=0.0)
    return _map(replace(_sum(branches), collectives=kept, dot_flops=dearest), conditional=True)


def _map(report: HloReport, **change) -> HloReport:
    return replace(report, collectives=tuple(replace(c, **change) for c in report.collectives))


def _sum(reports: Iterable[HloReport]) -> HloReport:
    reports = list(reports)
    return HloReport(
        collectives=tuple(c for r in reports for c in r.collectives),
        dot_flops=sum(r.dot_flops for r in reports),
        unknown_loops=tuple(dict.fromkeys(n for r in reports for n in r.unknown_loops)),
        opaque_calls=tuple(dict.fromkeys(n for r in reports for n in r.opaque_calls)),
    )
