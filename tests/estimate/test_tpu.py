"""Slices of TPUs: their shape follows from the hosts; their compiler may be missing."""

import importlib.util

import pytest

from jaxpar.errors import BackendError, ConfigError
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import topology_devices
from jaxpar.estimate.tpu import slice_shape


@pytest.mark.parametrize(
    ("cluster", "shape"),
    [("1x4xv5e", (2, 2)), ("2x4xv5e", (2, 4)), ("4x4xv6e", (4, 4)), ("64x4xv5e", (16, 16)), ("16x4xv5p", (4, 4, 4))],
)
def test_hosts_make_a_slice_as_square_as_they_can(cluster, shape):
    """Otherwise neighbours on an axis would be far apart, or XLA would know no such slice."""
    assert slice_shape(Cluster.parse(cluster)) == shape


def test_nodes_that_are_no_hosts_are_refused():
    """Otherwise XLA would say so, in its own words."""
    with pytest.raises(ConfigError, match="write NODESx4xv5e"):
        slice_shape(Cluster.parse("2x8xv5e"))


def test_a_missing_compiler_is_named_with_its_mend(monkeypatch):
    """Otherwise one would have to guess which package compiles for TPUs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'jaxpar\[aot-tpu\]'"):
        topology_devices(Cluster.parse("2x4xv5e"))
