"""One run in several processes: how they find each other, and how one that fails leaves them."""

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.errors import ConfigError

# Each tells, inside what `srun` or `mpirun` started, how many processes it started.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
AUTO = "auto"


@dataclass(frozen=True)
class Processes:
    """Where process 0 listens (host:port, or `auto`), how many there are, and which of them this is.

    What is None comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from the launcher.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None

    def completed(self) -> "Processes":
        """With what the environment says."""
        return Processes(
            self.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
            _whole("JAX_NUM_PROCESSES") if self.count is None else self.count,
            _whole("JAX_PROCESS_ID") if self.index is None else self.index,
        )

    @property
    def several(self) -> bool:
        """Whether anything, on the command line or around, speaks of more than this process."""
        named = (self.coordinator, self.count, self.index) != (None, None, None)
        return named or any((_whole(name) or 1) > 1 for name in _LAUNCHERS)


def join(processes: Processes, heartbeat_timeout: int) -> None:
    """Meets the other processes, if there are any. Call it before anything else touches jax.

    `heartbeat_timeout`: seconds; see `jax.distributed.initialize`. Raises `ConfigError`.
    """
    processes = processes.completed()
    if not processes.several or jax.distributed.is_initialized():  # the script may have done it
        return
    address = None if processes.coordinator == AUTO else processes.coordinator
    if address is not None and not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"coordinator {address!r}: needs host:port of process 0, such as node1:12345, or auto")
    # Its handler would swallow SIGTERM until training starts. From then on `train` has its own, for SIGINT as well.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            processes.count,
            processes.index,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"this process could not join the others ({error}). Declared: {processes}. Start each process with "
            f"--coordinator host:port --processes N --process-id I, or with srun or mpirun"
        ) from error


def check_alike(declared: Mapping[str, Any]) -> None:
    """Every process calls it with what it was started with, as JSON. Raises `ConfigError` on all if it differs."""
    if jax.process_count() == 1:
        return
    known = hashlib.blake2b(json.dumps(declared, sort_keys=True).encode(), digest_size=16).digest()
    all_known = multihost_utils.process_allgather(np.frombuffer(known, np.uint32))
    if other := [i for i, theirs in enumerate(all_known) if (theirs != all_known[0]).any()]:
        raise ConfigError(
            f"the processes were started differently: {other} are not like process 0. Give every process the same "
            f"config, --directory, --resume and --dry-run; only --process-id differs"
        )


@contextmanager
def end_at_once() -> Iterator[None]:
    """A process of several that fails ends without the farewell at which jax waits for the others, who wait for it."""
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _whole(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: needs a whole number")
    return int(text)
