"""Whether a start is one of several processes, and what is wrong with how it says so. `tests/processes` starts some."""

import re

import jax
import pytest

from jaxpar.cli.processes import Processes, join
from jaxpar.errors import ConfigError

LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", *LAUNCHERS)


@pytest.fixture(autouse=True)
def joined(monkeypatch):
    """What jax is asked for."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **more: asked.append(given))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    return asked


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (Processes(), {}, []),
        (Processes(), {"SLURM_STEP_NUM_TASKS": "1"}, []),
        (Processes(), {"SLURM_STEP_NUM_TASKS": "2"}, [(None, None, None)]),
        (Processes(), {"OMPI_COMM_WORLD_SIZE": "8"}, [(None, None, None)]),
        (Processes("auto"), {}, [(None, None, None)]),
        (Processes("a:1", 4, 0), {"JAX_NUM_PROCESSES": "2"}, [("a:1", 4, 0)]),
        (Processes(), dict(zip(NAMES, ("a:1", "2", "1"), strict=False)), [("a:1", 2, 1)]),
    ],
)
def test_a_start_joins_others_when_something_speaks_of_them(given, environment, expected, monkeypatch, joined):
    """Otherwise a run alone would wait for others, or each of eight would train by itself into one folder."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    join(given, 100)
    assert joined == expected


def test_a_wrong_address_or_number_is_refused_with_its_name(monkeypatch):
    """Otherwise the start would wait for five minutes, or fail inside jax."""
    with pytest.raises(ConfigError, match="coordinator 'node1': needs host:port of process 0"):
        join(Processes("node1", 2, 0), 100)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES='two' in the environment: needs a whole number"):
        join(Processes(), 100)


def test_a_start_that_jax_refuses_says_what_was_declared(monkeypatch):
    """Otherwise one would see a traceback in place of which of the three was forgotten."""

    def refuse(*given, **more):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(ConfigError, match=re.escape("Number of processes must be defined.). Declared: Processes(")):
        join(Processes("node1:1234"), 100)
