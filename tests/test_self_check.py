"""The start-up self-check: silent when jax is right, precise when it is not, and free the second time."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar import self_check as module
from jaxpar.errors import BackendError
from jaxpar.self_check import first_difference, self_check


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxpar" / "self_check.json"


@pytest.fixture
def calls(monkeypatch):
    """Replaces the checks by one that counts how often it runs."""
    seen = []
    monkeypatch.setattr(module, "CHECKS", {"nothing": lambda devices: iter(seen.append(len(devices)) or ())})
    return seen


@pytest.mark.parametrize("count", [8, 7, 2, 1])
def test_the_installed_jax_passes_on_any_number_of_devices(count):
    """Otherwise nobody could start a run with this jax, or on an odd number of devices."""
    self_check(jax.devices()[:count])


def doubled(operation):
    return lambda *args, **kwargs: 2 * operation(*args, **kwargs)


@pytest.mark.parametrize(
    ("library", "operation", "check", "numbers"),
    [
        (jnp, "concatenate", "concatenate", "is 2 on device 0, must be 1"),
        (jnp, "cumsum", "cumsum", "is 2 on device 0, must be 1"),
        (lax, "psum", "gradient", "is 1680 on device 0, must be 840"),
        (lax, "all_gather", "all_gather", "on device 0, must be"),
        (lax, "psum_scatter", "all_gather", "on device 0, must be"),
    ],
)
def test_a_wrong_operation_is_named_with_its_numbers(library, operation, check, numbers, monkeypatch, cache):
    """Otherwise a run would start on a jax that computes something else, and nobody would know why."""
    monkeypatch.setattr(library, operation, doubled(getattr(library, operation)))
    with pytest.raises(BackendError) as caught:
        self_check()
    (fault,) = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert fault.startswith(f"  - {check}") and numbers in fault
    assert f"jax {jax.__version__}" in str(caught.value)
    assert not cache.exists(), "a failure must not be remembered as a pass"


def test_a_psum_taken_twice_is_found(monkeypatch):
    """Otherwise every gradient could be eight times too large: jax takes a psum, and jaxpar another."""
    monkeypatch.setattr(lax, "pcast", lambda x, axes, to: x)
    with pytest.raises(BackendError, match=r"gradient.*element \[\] is 6720 on device 0, must be 840"):
        self_check()


def test_an_operation_that_raises_is_named(monkeypatch):
    """Otherwise the user would meet a traceback from inside the check instead of a statement about jax."""

    def gone(*args, **kwargs):
        raise AttributeError("no such operation")

    monkeypatch.setattr(lax, "psum_scatter", gone)
    with pytest.raises(BackendError, match="nested shard_map: raised AttributeError: no such operation"):
        self_check()


def test_one_replica_that_went_astray_is_found():
    """Otherwise data-parallel replicas could drift apart: the assembled array shows only the first."""
    devices = jax.devices()
    right = np.arange(4, dtype=np.float32)
    shards = [jax.device_put(right + (i == 5) * np.float32([0, 0, 1, 0]), d) for i, d in enumerate(devices)]
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    found = jax.make_array_from_single_device_arrays((4,), sharding, shards)
    assert first_difference(found, right) == "element [2] is 3 on device 5, must be 2"
    assert first_difference(found, right[:3]) == "has shape (4,), must be (3,)"


def test_second_start_takes_the_answer_from_the_cache(calls, cache):
    """Otherwise every start would pay for the check again."""
    self_check()
    self_check()
    assert calls == [8]
    assert list(json.loads(cache.read_text()).values()) == [["nothing"]]


def test_another_device_count_other_flags_and_new_checks_are_checked_again(calls, monkeypatch):
    """Otherwise one good machine would vouch for another compiler, or for a check it never ran."""
    self_check()
    self_check(jax.devices()[:4])
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere")
    self_check()
    monkeypatch.setattr(module, "CHECKS", {"another": module.CHECKS["nothing"]})
    self_check()
    assert calls == [8, 4, 8, 8]


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_a_damaged_cache_is_ignored_and_replaced(content, calls, cache):
    """Otherwise a file cut short by a full disk would stop every later run."""
    cache.parent.mkdir()
    cache.write_text(content)
    self_check()
    self_check()
    assert calls == [8]


def test_a_cache_that_cannot_be_written_is_no_error(calls, tmp_path, monkeypatch):
    """Otherwise a read-only home would keep a cluster from training."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    self_check()
    self_check()
    assert calls == [8, 8]
