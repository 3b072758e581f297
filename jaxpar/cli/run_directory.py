"""Room for a new run where an old one stands: nothing is ever deleted."""

import itertools
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import multihost_utils


def move_aside(directory: Path, say: Callable[[str], None]) -> None:
    """Renames `directory` to the first of `<name>.1`, `<name>.2`, ... that is free, if there is one."""
    if jax.process_index() == 0 and directory.exists():
        free = (directory.with_name(f"{directory.name}.{n}") for n in itertools.count(1))
        aside = next(path for path in free if not path.exists())
        directory.rename(aside)
        say(f"moved the old run in {directory} to {aside}")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("move_aside")
