"""Compile a lowered step, with or without its devices, and report its memory, FLOPs and communication."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from jaxpar.errors import BackendError
from jaxpar.estimate.compiler_log import filtered
from jaxpar.estimate.hlo import Collective, Totals, read_module, totals
from jaxpar.estimate.hlo_text import Module, parse_module
from jaxpar.estimate.lint import Finding, lint
from jaxpar.estimate.live import Buffer, dump_options, largest_buffers
from jaxpar.estimate.memory import Memory, memory
from jaxpar.estimate.sizes import size
from jaxpar.estimate.source_lines import best_line
from jaxpar.estimate.topology import compiler_options
from jaxpar.estimate.uses import Uses
from jaxpar.run import Run


@dataclass(frozen=True)
class StepReport:
    """What XLA's compiled program will take and do, per device and step; sizes in bytes.

    `peak_bytes` is all that XLA allocates: arguments, outputs that are not donated arguments, and
    temporaries. `host_bytes` is what lies in the host's memory and not in the device's; a simulated device has no
    other, there it is 0. `flops` and `collectives` count executions; `unknown_loops` and `opaque_calls` name what
    they cannot see into (see `HloReport`). `compile_seconds` is 0 for a program that came compiled.

    Of a `Run`'s step, see `step_report`: `memory`, the peak by kind; `lint`, what the plan does not promise;
    `largest`, the largest buffers alive at the peak. Of a `Program`'s, `predicted_peak_bytes`: what `MemoryModel` says
    of `peak_bytes` without compiling.
    """

    device_kind: str
    devices: int
    peak_bytes: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: float
    collectives: tuple[Collective, ...]
    host_bytes: int = 0
    compile_seconds: float = 0.0
    unknown_loops: tuple[str, ...] = ()
    opaque_calls: tuple[str, ...] = ()
    memory: Memory | None = None
    lint: tuple[Finding, ...] = ()
    largest: tuple[Buffer, ...] = ()
    predicted_peak_bytes: int = 0

    def totals(self, *, singletons: bool = False) -> Totals:
        """{(mesh axes, kind): (executions, bytes)}; groups of one device only when asked for."""
        return totals(self.collectives, singletons=singletons)

    def table(self) -> str:
        """The report as plain text, for a terminal."""
        compiled = f"compiled in {self.compile_seconds:.1f} s"
        lines = [
            f"{self.devices} x {self.device_kind}, per device and step ({compiled})",
            *(f"  {name:<12}{size(getattr(self, f'{name}_bytes')):>12}" for name in _MEMORY),
            *([f"  {'predicted':<12}{size(self.predicted_peak_bytes):>12}"] if self.predicted_peak_bytes else []),
            *([f"  {'in host':<12}{size(self.host_bytes):>12}"] if self.host_bytes else []),
            f"  {'dot FLOPs':<12}{self.flops:>12.4g}",
        ]
        lines += _collective_lines(self.collectives)
        lines += [f"  at least: loop {n} has no fixed trip count and counts once" for n in self.unknown_loops]
        lines += [f"  at least: the FLOPs of kernel {n} are not known" for n in self.opaque_calls]
        return "\n".join(lines)

    def full_table(self) -> str:
        """`table`, and of a run's step the peak by kind, the largest buffers and the findings."""
        lines = [self.table()]
        if self.memory is not None:
            lines += ["", "peak by kind", *(f"  {k:<12}{size(v):>12}" for k, v in asdict(self.memory).items())]
        if self.largest:
            lines += ["", "largest buffers alive at the peak"]
            lines += [f"  {size(b.bytes):>12}  {b.shape}  {b.what}  {b.source}".rstrip() for b in self.largest]
        lines += ["", *(f"finding: {finding}" for finding in self.lint)] if self.lint else ["", "no findings"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Every number of the report; collectives with the axes and the source line of each."""
        plain = asdict(replace(self, collectives=()))
        plain["collectives"] = [_plain_collective(c) for c in self.collectives if c.axes]
        return json.dumps(plain, indent=2)


_MEMORY = ("peak", "argument", "output", "temp")
_COLLECTIVE = ("axis", "kind", "executions", "bytes", "asynchronous", "overlaps_dot", "conditional", "loop_depth")


def _plain_collective(c: Collective) -> dict[str, Any]:
    plain = {name: getattr(c, name) for name in _COLLECTIVE}
    return plain | {"source": best_line(c.frames), "parameters": [path for path in c.parameters if path]}


def report(program: jax.stages.Lowered | jax.stages.Compiled, mesh: jax.sharding.Mesh) -> StepReport:
    """Compiles `program` for the devices of `mesh` (it may only describe them) and reads the result.

    mesh: the mesh whose shardings the program was lowered with. Raises BackendError when it is another one.
    """
    if isinstance(program, jax.stages.Compiled):
        return _read(program, mesh)[0]
    compiled, seconds = _compile(program, mesh)
    return replace(_read(compiled, mesh)[0], compile_seconds=seconds)


def step_report(run: Run, program: jax.stages.Lowered) -> StepReport:
    """The whole report of a run's lowered step: `report`'s, memory by kind, findings and the largest buffers."""
    with TemporaryDirectory() as directory:
        compiled, seconds = _compile(program, run.mesh, dump_options(directory))
        found, module = _read(compiled, run.mesh)
        largest = largest_buffers(Path(directory), module)
    return replace(
        found,
        compile_seconds=seconds,
        memory=memory(run, module, found.peak_bytes, found.temp_bytes),
        lint=lint(run, found.collectives, Uses(module)),
        largest=largest,
    )


def _compile(
    program: jax.stages.Lowered, mesh: jax.sharding.Mesh, more: dict[str, int | bool | str] | None = None
) -> tuple[jax.stages.Compiled, float]:
    options = compiler_options(mesh.devices.flat[0].platform) | (more or {})
    started = time.perf_counter()
    with filtered():
        compiled = program.compile(compiler_options=options)
    return compiled, time.perf_counter() - started


def _read(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> tuple[StepReport, Module]:
    device = mesh.devices.flat[0]
    _check_mesh(compiled, mesh)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise BackendError(f"XLA for {device.platform} gives no program text or no memory analysis to report")
    module = parse_module(text)
    hlo = read_module(module, mesh.shape)
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    found = StepReport(
        device_kind=device.device_kind,
        devices=mesh.size,
        # Not peak_memory_in_bytes: on CPU it leaves the temporaries out.
        peak_bytes=arguments + outputs - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        host_bytes=_host_bytes(memory),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=arguments,
        output_bytes=outputs,
        flops=hlo.dot_flops,
        collectives=hlo.collectives,
        unknown_loops=hlo.unknown_loops,
        opaque_calls=hlo.opaque_calls,
    )
    return found, module


def _host_bytes(memory: Any) -> int:
    given, made = memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes
    return given + made - memory.host_alias_size_in_bytes + memory.host_temp_size_in_bytes


def _check_mesh(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> None:
    """Names of axes are read off device positions, so another order of devices would name the wrong axes."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        theirs = getattr(sharding, "mesh", None)
        if theirs is not None and list(theirs.devices.flat) != list(mesh.devices.flat):
            raise BackendError(
                f"the program is sharded over the mesh {dict(theirs.shape)} and was given {dict(mesh.shape)}"
                ", whose devices are others or stand in another order: pass the mesh it was lowered with"
            )


def _collective_lines(collectives: tuple[Collective, ...]) -> list[str]:
    table, over = totals(collectives), totals(tuple(c for c in collectives if c.overlaps_dot))
    if not table:
        return ["  no collectives"]
    rows = sorted(
        (",".join(key[0]), key[1], f"{n}", size(moved), f"{over.get(key, (0, 0))[1] / max(moved, 1):.0%}")
        for key, (n, moved) in table.items()
    )
    rows.insert(0, ("axes", "collective", "executions", "bytes", "over matmuls"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
