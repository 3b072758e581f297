"""From printed device groups to mesh axes, in every notation that XLA prints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.estimate.replica_groups import collective_axes

AXES = (("data", 4), ("tensor", 2))


def axes_of(groups: str, axes=AXES) -> tuple[str, ...]:
    return collective_axes(f", channel_id=1, replica_groups={groups}, dimensions={{0}}", axes)[0]


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,2,4,6},{1,3,5,7}}",
        "{{7,5,3,1},{4,6,2,0}}",  # the order inside and between groups is no matter here
        "[2,4]<=[4,2]T(1,0)",
        "mesh['data'=4,'tensor'=2] {'data'}",
        "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}",
        "mesh[a=2,b=2,c=2] {a,b}",
        "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
        "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
        "mesh['a'=8] {'a':(1)4}",
    ],
)
def test_every_notation_of_the_data_groups_says_data(groups):
    """Otherwise one printing of the same groups would go to another axis."""
    assert axes_of(groups) == ("data",)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("data", "tensor")),
        ("[1,8]<=[8]", ("data", "tensor")),
        ("[4,2]<=[8]", ("tensor",)),
        ("[8,1]<=[8]", ()),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,2},{4,6},{1,3},{5,7}}", ("data:(2)2",)),
        ("{{0,4},{2,6},{1,5},{3,7}}", ("data:(1)2",)),
        ("mesh['data'=4,'tensor'=2] {'data':(1)2}", ("data:(1)2",)),
        ("mesh['data'=4,'tensor'=2] {'data':(2)2}", ("data:(2)2",)),
        ("{{0,1,2,3},{4,5,6,7}}", ("data:(2)2", "tensor")),
        ("{{0,1,2},{3,4,5},{6,7}}", ("data?", "tensor?")),
        ("{{0,6},{2,4},{1,7},{3,5}}", ("data?",)),
    ],
)
def test_groups_give_the_axes_that_they_join(groups, axes):
    """Otherwise parts of axes, or groups that no axis explains, would pass for whole axes."""
    assert axes_of(groups) == axes


def test_groups_of_replicas_are_no_groups_of_devices():
    """Otherwise a collective without a channel, which joins nothing, would seem to join all devices."""
    assert collective_axes(", replica_groups={}, to_apply=%add", AXES) == ((), 1)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chosen=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_notations_agree_on_any_mesh(sizes, chosen):
    """Otherwise the answer would depend on which notation XLA happens to choose."""
    axes = tuple((f"a{i}", size) for i, size in enumerate(sizes))
    inside = [i for i in range(len(sizes)) if chosen[i]]
    order = [i for i in range(len(sizes)) if not chosen[i]] + inside
    count = int(np.prod([sizes[i] for i in inside]))
    groups = np.arange(int(np.prod(sizes))).reshape(sizes).transpose(order).reshape(-1, count)
    listed = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    ranged = f"[{len(groups)},{count}]<=[{joined(sizes)}]T({joined(order)})"
    named = "mesh[" + joined(f"'{n}'={s}" for n, s in axes) + "] {" + joined(f"'a{i}'" for i in inside) + "}"
    expected = tuple(f"a{i}" for i in inside if sizes[i] > 1)
    for text in (listed, ranged, named):
        assert collective_axes(f", channel_id=1, replica_groups={text}", axes) == (expected, count)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("data",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),  # does not wrap
        ("{{0,3},{3,0}}", ("data", "tensor")),
        ("{{0,0},{1,1}}", ()),
    ],
)
def test_a_permute_is_over_the_axes_its_pairs_move_along(pairs, axes):
    """Otherwise a pipeline's or a ring's shifts would be named by no axis, or by all."""
    assert collective_axes(f", channel_id=1, source_target_pairs={pairs}, metadata={{}}", AXES)[0] == axes


def joined(items) -> str:
    return ",".join(map(str, items))
