"""Compiled programs that the next start finds."""

import os
import subprocess
import sys

import jax

from jaxpar.cli.compile_cache import use_compile_cache
from jaxpar.plan import Plan

CODE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxpar.cli import compile_cache
from jaxpar.plan import Plan
compile_cache._WORTH_KEEPING = 0.0  # this one compiles in no time
compile_cache.use_compile_cache(Path(sys.argv[1]), Plan(sys.argv[2]))
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
print(float(jax.jit(lambda x: jnp.sin(x) @ x)(jax.device_put(2.0 * np.eye(4))).sum()), len(hits))
"""


def start(directory, mesh="data=1", **environment):
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", CODE, str(directory), mesh]
    done = subprocess.run(command, env=kept | {"PYTHONPATH": "."} | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_second_start_takes_the_program_of_the_first(tmp_path):
    """Otherwise every start would compile again what it compiled before."""
    first, second = start(tmp_path / "cache"), start(tmp_path / "cache")
    assert first[1] == "0" and second[0] == first[0] and int(second[1]) >= 1


def test_pipelines_on_cpu_keep_no_program(tmp_path):
    """Otherwise XLA would crash or hang in the program of an interleaved schedule that it has read back."""
    start(tmp_path / "cache", "pipe=2")
    assert not (tmp_path / "cache").exists()


def test_a_place_or_a_refusal_that_the_user_gave_to_jax_is_kept(tmp_path):
    """Otherwise a cluster's own cache would not be used, or a disk be filled against the user's word."""
    start(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    start(tmp_path / "ours", JAX_ENABLE_COMPILATION_CACHE="false")
    assert not (tmp_path / "ours").exists()


def test_tests_compile_afresh(tmp_path):
    """Otherwise a program kept from before would answer for the code under test."""
    use_compile_cache(tmp_path, Plan())
    assert jax.config.jax_compilation_cache_dir is None
