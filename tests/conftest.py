"""Every test runs on eight simulated CPU devices, in arithmetic strict enough to show small differences."""

import gc
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes too: they must not take a GPU

# Compiles 2.7 times faster; what the user has set comes last, and wins.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import hypothesis
import jax
import pytest

SETTINGS = {
    "jax_platforms": "cpu",
    "jax_num_cpu_devices": 8,
    "jax_enable_compilation_cache": False,  # a stale program would answer for the code under test
    "jax_enable_x64": False,
    "jax_default_matmul_precision": "highest",
    "jax_numpy_rank_promotion": "raise",  # dtype promotion stays standard: optax's Adam relies on it
}
for name, value in SETTINGS.items():
    jax.config.update(name, value)

# Traces make many objects that live on: looking among them for cycles every time takes 3 % of all of it.
gc.set_threshold(100_000, 50, 100)

# print_blob: a failure prints the line that replays it. A compile inside an example would break any deadline.
hypothesis.settings.register_profile("jaxpar", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.load_profile("jaxpar")

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed():
    """Every compiled program is mapped into memory; past 65,530 mappings, Linux's limit, XLA ends in a segfault."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
