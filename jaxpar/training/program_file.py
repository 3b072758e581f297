"""What the compiled step of a run takes and does, kept in its folder."""

import json
from pathlib import Path
from typing import Any

from jaxpar.estimate.compile import StepReport
from jaxpar.run import Run
from jaxpar.training.callbacks import Callback, Loop
from jaxpar.training.table import bytes_per_device

FILE = "program.json"


class ProgramFile(Callback):
    """Writes `program.json` when a step is compiled: that of the last stage stays. On one process alone."""

    def __init__(self, directory: Path, bigram: float | None = None):
        """`bigram`: entropy of the held-out text given one token, in nats, for who reads the file."""
        self._directory, self._bigram = directory, bigram
        self._written: StepReport | None = None

    def on_step(self, loop: Loop) -> None:
        if loop.report is not None and loop.report is not self._written:
            self._written = loop.report
            about = describe(loop.run, loop.report) | {"bigram_entropy": self._bigram}
            partial = self._directory / f"{FILE}.partial"
            partial.write_text(json.dumps(about, indent=1) + "\n")
            partial.replace(self._directory / FILE)


def read_program(directory: Path) -> dict[str, Any]:
    """What `describe` gave; empty where no step was compiled yet."""
    path = directory / FILE
    return json.loads(path.read_text()) if path.exists() else {}


def describe(run: Run, report: StepReport) -> dict[str, Any]:
    """JSON: devices, FLOPs, `memory` by kind in bytes per device, and `collectives` by axes and kind."""
    return {
        "plan": str(run.plan),
        "device_kind": report.device_kind,
        "devices": report.devices,
        "compile_seconds": report.compile_seconds,
        "dot_flops": report.flops,
        "memory": memory_by_kind(run, report),
        "collectives": [
            {"axes": ",".join(axes), "kind": kind, "executions": executions, "bytes": size}
            for (axes, kind), (executions, size) in sorted(report.totals().items())
        ],
    }


def memory_by_kind(run: Run, report: StepReport) -> dict[str, int]:
    """Bytes on one device; together `report.peak_bytes`."""
    params, opt = bytes_per_device(run.abstract_state.params), bytes_per_device(run.abstract_state.opt_state)
    if not report.host_bytes:  # a simulated device's memory is the host's, and XLA counts what waits there
        opt += bytes_per_device(run.abstract_state.opt_state, on_host=True)
    return {
        "parameters": params,
        "optimizer state": opt,
        "batch and counters": report.argument_bytes - params - opt,
        "gradients, activations, temporaries": report.peak_bytes - report.argument_bytes,
    }


def binary(count: float) -> str:
    """Bytes with a unit, on one line: 512 B, 1.5 KiB, 24.4 MiB."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 4)
    number = f"{count / 1024**power:.3g}" if power else f"{count:.0f}"
    return f"{number}\N{NO-BREAK SPACE}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
