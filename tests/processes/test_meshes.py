"""A mesh of devices in two processes computes what the same mesh in one process does."""

import json

import pytest

from jaxpar.errors import PlanError
from jaxpar.mesh import make_mesh, row_shares
from tests.processes.launch import start
from tests.processes.meshes import MESHES, measure


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each of two processes found, started as Slurm starts them."""
    folder = tmp_path_factory.mktemp("meshes")
    results = start(folder, 2, module="tests.processes.meshes", by="slurm")
    assert [status for status, _ in results] == [0, 0], "\n".join(output for _, output in results)
    return [json.loads((folder / f"measured-{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def alone():
    return measure()


@pytest.mark.parametrize("mesh", [mesh for mesh, _ in MESHES])
def test_a_step_and_an_evaluation_in_two_processes_equal_those_in_one(measured, alone, mesh):
    """Otherwise rows would go to the wrong devices, or count twice where two processes hold the same ones."""
    assert measured[0] == measured[1]
    assert measured[0][mesh] == pytest.approx(alone[mesh], rel=1e-6)
    assert measured[0][mesh]["rows"] == alone[mesh]["rows"] == 3


class Device:
    """A device of process `id // 2`, that is not there."""

    platform = "cpu"

    def __init__(self, id):
        self.id, self.process_index = id, id // 2


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("data=8", {0: (0, 4), 1: (1, 4), 2: (2, 4), 3: (3, 4)}),
        ("data=2,tensor=4", {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
        ("pipe=2,data=4", {0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2)}),
        ("data=2,seq=2,expert=2", {0: (0, 4), 1: (1, 4), 2: (2, 4), 3: (3, 4)}),
        ("tensor=8", {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0, 1)}),
    ],
)
def test_processes_share_the_rows_that_their_devices_hold(mesh, expected):
    """Otherwise a process would read rows of other devices, and its own would train on none or on others'."""
    assert row_shares(make_mesh(mesh, [Device(i) for i in range(8)])) == expected


def test_a_mesh_that_cuts_a_process_apart_is_refused():
    """Otherwise a process would be asked for rows that no equal part of the batch holds."""
    with pytest.raises(PlanError, match=r"3 row shards on 3 processes.*process 1 holds shards \[0, 2\]"):
        row_shares(make_mesh("pipe=2,data=3", [Device(i) for i in range(6)]))
