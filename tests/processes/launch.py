"""Runs a module in one process or several, and never leaves one behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEVICES = 4  # over all processes
SCRIPT = "tests.processes.script"


def start(folder, processes, *arguments, each=((), ()), module=SCRIPT, by="flags", trouble=None, timeout=150.0):
    """-> [(exit status, output)] by process. `each`: arguments of each process alone; `by`: how they find each other.

    What still runs after `timeout` seconds is killed; its status is then -9.
    """
    command = [sys.executable, "-m", module, "--simulate", str(DEVICES // processes), *arguments]
    outputs = [folder / f"output-{i}.txt" for i in range(processes)]
    port, children = _free_port(), []
    try:
        for i, output in enumerate(outputs):
            flags, environment = _LAUNCHERS[by](port, processes, i) if processes > 1 else ([], {})
            environment = _environment(folder) | environment | ({"TROUBLE": trouble} if trouble else {})
            with output.open("w") as file:  # a pipe that nobody reads would stop the child
                to = {"stdout": file, "stderr": subprocess.STDOUT}
                children.append(subprocess.Popen([*command, *flags, *each[i]], cwd=folder, env=environment, **to))
        end = time.monotonic() + timeout
        while any(child.poll() is None for child in children) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [(child.returncode, output.read_text()) for child, output in zip(children, outputs, strict=True)]


def _environment(folder):
    """Nothing of a cluster that the tests themselves may run on."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "JAX_")) and k != "XLA_FLAGS"}
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    flags = "--xla_backend_optimization_level=0"
    return kept | cache | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


_LAUNCHERS = {
    "flags": lambda port, n, i: (
        ["--coordinator", f"localhost:{port}", "--processes", str(n), "--process-id", str(i)],
        {},
    ),
    "environment": lambda port, n, i: (
        [],
        {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(n), "JAX_PROCESS_ID": str(i)},
    ),
    "slurm": lambda port, n, i: (  # what srun sets
        [],
        {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(n),
            "SLURM_STEP_NUM_TASKS": str(n),
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
            "JAX_COORDINATOR_PORT": str(port),
        },
    ),
}


def _free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
