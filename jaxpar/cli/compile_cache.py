"""Compiled programs on disk, so that a run's second start need not compile."""

import hashlib
import platform
from pathlib import Path

import jax

from jaxpar.plan import Plan

_WORTH_KEEPING = 0.1  # seconds of compilation


def use_compile_cache(directory: Path, plan: Plan) -> None:
    """Makes this process keep its compiled programs in `directory`; call it before anything compiles.

    Not those of a pipeline on CPU: XLA crashes or hangs in one that it has read back if it holds sums over devices
    under a condition, as interleaved schedules do (seen with jax 0.12.0.1, each time from the second start on).

    Nothing changes where jax has been given another place (JAX_COMPILATION_CACHE_DIR), or told to keep none
    (JAX_ENABLE_COMPILATION_CACHE). Programs for another version of jax, another mesh or other options have other keys.
    """
    if jax.default_backend() == "cpu" and plan.shape.sizes["pipe"] != 1:
        return
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute() / _devices()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)


def _devices() -> str:
    """What jax's keys leave out: code for one CPU may hold instructions that another one on the same disk lacks."""
    backend = jax.default_backend()
    if backend != "cpu":
        return backend
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.node()
    return f"cpu-{hashlib.blake2b(features.encode(), digest_size=4).hexdigest()}"
