"""A plan is a value that is right or says everything that is wrong with it."""

import json

import pytest

from jaxpar import Capacity, Hybrid, Pipeline, Plan, PlanError
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.pipeline import build


def test_a_plan_survives_a_dict_and_equals_itself():
    """Otherwise a checkpoint or a configuration file would bring back another plan."""
    plan = Plan("tensor=2,data=-1", zero=3, microbatches=4, precision="bfloat16", remat="full")
    assert Plan.from_dict(plan.to_dict()) == plan
    assert hash(plan) == hash(Plan.from_dict(plan.to_dict()))
    assert plan != Plan("tensor=2,data=-1", zero=2, microbatches=4, precision="bfloat16", remat="full")


def test_a_plan_prints_what_is_not_standard_in_one_order_of_axes():
    """Otherwise two equal plans would look different in a log."""
    assert str(Plan("tensor=2, data=4", zero=1)) == "Plan(mesh='data=4,tensor=2', zero=1)"
    assert Plan("tensor=2,data=4") == Plan("data=4,tensor=2,pipe=1")
    assert str(Plan()) == "Plan()"


def test_what_is_left_of_the_devices_goes_to_the_axis_that_asks():
    """Otherwise -1 would be a size."""
    assert Plan("data=-1,tensor=2").resolve(8) == Plan("data=4,tensor=2")
    assert Plan("tensor=-1").resolve(8).shape.tensor == 8


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=-1,tensor=-1", "only one axis can be -1"),
        ("dta=8", "no axis 'dta'; the axes are data, pipe, tensor, seq, expert"),
        ("data=4,data=2", "axis 'data' is given twice"),
        ("data=four", "needs a whole number, found 'four'; write e.g. 'data=4,tensor=2'"),
        ("data", "needs a whole number, found ''"),
        ("data=0,tensor=-2", "sizes are positive, or -1 for what is left; found data=0, tensor=-2"),
    ],
)
def test_a_mesh_that_cannot_be_read_says_why(mesh, message):
    """Otherwise a typing error would show as a failure deep inside jax."""
    with pytest.raises(PlanError, match=message):
        Plan(mesh)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=3,tensor=2", r"needs 6 devices, found 8; choose sizes that multiply to 8, or leave one axis at -1"),
        ("data=-1,tensor=3", r"needs a multiple of 3 devices, found 8; .*one of \[1, 2, 4, 8\]"),
    ],
)
def test_a_mesh_that_does_not_multiply_to_the_devices_says_what_would(mesh, message):
    """Otherwise devices would stay idle, or jax would speak of a reshape."""
    with pytest.raises(PlanError, match=message):
        Plan(mesh).resolve(8)
    with pytest.raises(PlanError, match=message):
        make_mesh(mesh)


def test_all_wrong_values_are_listed_at_once():
    """Otherwise a user mends one, waits, and meets the next."""
    with pytest.raises(PlanError) as caught:
        Plan(zero=4, microbatches=0, precision="float16", remat="some")
    problems = caught.value.problems
    assert [p.split("=")[0] for p in problems] == ["zero", "microbatches", "precision", "remat"]
    assert "needs one of float32, bfloat16" in problems[2] and "needs one of none, dots, full" in problems[3]


def test_unknown_keys_are_named_with_the_nearest_known_one():
    """Otherwise a misspelt option would be dropped, and the standard value used in silence."""
    with pytest.raises(PlanError) as caught:
        Plan.from_dict({"microbatch": 4, "zero": 1, "colour": "red"})
    first, second = caught.value.problems
    assert first == "unknown key 'microbatch'; did you mean 'microbatches'?"
    assert second.startswith("unknown key 'colour'; known keys: mesh, zero")


def test_what_is_offloaded_has_one_order_and_known_names():
    """Otherwise two equal plans would differ, a checkpoint's JSON bring back another, or a typo keep memory full."""
    plan = Plan(offload=("activations", "optimizer"), reduce_dtype="bfloat16")
    assert plan == Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert plan.offload == ("optimizer", "activations")
    for wrong in ("optimizer", ("optimiser",)):
        with pytest.raises(PlanError, match=r"offload=.*needs a tuple of 'optimizer', 'activations'; \(\) for nothing"):
            Plan(offload=wrong)
    with pytest.raises(PlanError, match="reduce_dtype='float16': needs one of float32, bfloat16"):
        Plan(reduce_dtype="float16")


def test_tensor_gets_neighbours_and_data_the_distant_devices():
    """Otherwise the busiest axis would cross the slowest wires."""
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    assert mesh.axis_names == ("data", "pipe", "tensor", "seq", "expert")
    assert [d.id for d in mesh.devices[0, 0, :, 0, 0]] == [0, 1]
    assert [d.id for d in mesh.devices[:, 0, 0, 0, 0]] == [0, 2, 4, 6]


def test_a_schedule_of_ones_own_goes_through_a_plan_as_its_clock_table():
    """Otherwise a plan with one could not be written down, or another schedule would be played."""
    own = build("zero_bubble", 2, 4, fill=True)
    plan = Plan("pipe=2", microbatches=4, pipeline=own)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.schedule(2).ticks == own.ticks


def test_a_schedule_of_ones_own_for_another_plan_is_refused_with_both_numbers():
    """Otherwise it would fail in the middle of a trace, or leave microbatches out."""
    with pytest.raises(PlanError, match=r"2 stages where the plan has 4, 4 microbatches where the plan has 8"):
        Plan("pipe=4", microbatches=8, pipeline=build("1f1b", 2, 4))
    with pytest.raises(PlanError, match=r"has one lane and is no V"):
        Plan("pipe=2", microbatches=4, pipeline=build("zero_bubble_v", 2, 4))


def test_the_parts_of_a_plan_may_be_given_as_values():
    """Otherwise two ways to say one thing would be two plans."""
    assert Plan("pipe=2", pipeline=Pipeline("interleaved", virtual_stages=2)) == Plan(
        "pipe=2", pipeline="interleaved", virtual_stages=2
    )
    assert Plan("seq=4", attention=Hybrid(2)) == Plan("seq=4", ulysses=2)
    assert Plan("expert=2", experts=Capacity(1.5)) == Plan("expert=2", experts="capacity", capacity=1.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "seq=4", "attention": "rnig"}, r"attention='rnig': needs one of ring, ulysses, allgather"),
        ({"mesh": "seq=4", "ulysses": 3}, r"ulysses=3 must divide seq=4; choose one of \[1, 2, 4\]"),
        ({"mesh": "data=2", "virtual_stages": 2}, r"need a pipeline; give the mesh stages"),
        ({"mesh": "pipe=2", "pipeline": "zero_buble"}, r"did you mean 'zero_bubble'"),
        ({"mesh": "expert=2", "experts": "capacity"}, r"write experts=Capacity"),
    ],
)
def test_what_pipelines_rows_and_experts_cannot_be_is_said_with_the_mend(options, said):
    """Otherwise a misspelt word would cost a compile, or be taken for the default."""
    with pytest.raises(PlanError, match=said):
        Plan(**options)
