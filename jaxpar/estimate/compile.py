"""Compile a lowered step, with or without its devices, and report its memory, FLOPs and communication."""

import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import BackendError
from jaxpar.estimate.hlo import Collective, Totals, read_hlo, totals
from jaxpar.estimate.topology import compiler_options


@dataclass(frozen=True)
class StepReport:
    """What XLA's compiled program will take and do, per device and step; sizes in bytes.

    `peak_bytes` is all that XLA allocates: arguments, outputs that are not donated arguments, and
    temporaries. `host_bytes` is what lies in the host's memory and not in the device's; a simulated device has no
    other, there it is 0. `flops` and `collectives` count executions; `unknown_loops` and `opaque_calls` name what
    they cannot see into (see `HloReport`). `compile_seconds` is 0 for a program that came compiled.
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

    def totals(self, *, singletons: bool = False) -> Totals:
        """{(mesh axes, kind): (executions, bytes)}; groups of one device only when asked for."""
        return totals(self.collectives, singletons=singletons)

    def table(self) -> str:
        """The report as plain text, for a terminal."""
        compiled = f"compiled in {self.compile_seconds:.1f} s"
        lines = [
            f"{self.devices} x {self.device_kind}, per device and step ({compiled})",
            *(f"  {name:<12}{_size(getattr(self, f'{name}_bytes')):>12}" for name in _MEMORY),
            *([f"  {'in host':<12}{_size(self.host_bytes):>12}"] if self.host_bytes else []),
            f"  {'dot FLOPs':<12}{self.flops:>12.4g}",
        ]
        lines += _collective_lines(self.totals())
        lines += [f"  at least: loop {n} has no fixed trip count and counts once" for n in self.unknown_loops]
        lines += [f"  at least: the FLOPs of kernel {n} are not known" for n in self.opaque_calls]
        return "\n".join(lines)


_MEMORY = ("peak", "argument", "output", "temp")


def report(program: jax.stages.Lowered | jax.stages.Compiled, mesh: jax.sharding.Mesh) -> StepReport:
    """Compiles `program` for the devices of `mesh` (it may only describe them) and reads the result.

    mesh: the mesh whose shardings the program was lowered with. Raises BackendError when it is another one.
    """
    device = mesh.devices.flat[0]
    started = time.perf_counter()
    if isinstance(program, jax.stages.Lowered):
        compiled = program.compile(compiler_options=compiler_options(device.platform))
        seconds = time.perf_counter() - started
    else:
        compiled, seconds = program, 0.0
    _check_mesh(compiled, mesh)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise BackendError(f"XLA for {device.platform} gives no program text or no memory analysis to report")
    hlo = read_hlo(text, mesh.shape)
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return StepReport(
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
        compile_seconds=seconds,
        unknown_loops=hlo.unknown_loops,
        opaque_calls=hlo.opaque_calls,
    )


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


def _collective_lines(table: Totals) -> list[str]:
    if not table:
        return ["  no collectives"]
    rows = sorted((",".join(axes), kind, f"{n}", _size(size)) for (axes, kind), (n, size) in table.items())
    rows.insert(0, ("axes", "collective", "executions", "bytes"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
