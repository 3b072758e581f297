"""The time of collectives: bytes over bandwidth by level, and hops."""

from dataclasses import replace

import pytest

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import device
from jaxpar.estimate.links import Group, Links, place

H100, LARGE = device("h100"), 10e9
LINKS = Links(H100, Constants())
INSIDE, ACROSS, APART = Group(8, 8), Group(64, 8), Group(8, 1)


def faster(level: str, factor: float) -> Links:
    link = getattr(H100, level)
    return Links(replace(H100, **{level: replace(link, bandwidth=factor * link.bandwidth)}), Constants())


@pytest.mark.parametrize("collective", ["gather", "reduce", "exchange", "send"])
@pytest.mark.parametrize(("level", "group"), [("fast", INSIDE), ("slow", APART)])
def test_twice_the_bandwidth_halves_what_bandwidth_limits(collective, level, group):
    """Otherwise the time would not be bytes over bandwidth of the level that carries them."""
    now, then = (getattr(links, collective)(LARGE, group) for links in (LINKS, faster(level, 2.0)))
    assert then == pytest.approx(now / 2, rel=0.01)


def test_a_group_inside_a_domain_does_not_see_the_network():
    """Otherwise a slow network would slow what never uses it."""
    assert faster("slow", 0.1).reduce(LARGE, INSIDE) == LINKS.reduce(LARGE, INSIDE)


def test_neighbours_use_all_their_adapters_at_once():
    """Otherwise FSDP over whole machines would be timed with one adapter for eight devices."""
    assert LINKS.gather(LARGE, Group(64, 8)) < LINKS.gather(LARGE, Group(64, 1)) / 6


def test_an_all_reduce_moves_what_a_scatter_and_a_gather_do():
    """Otherwise ZeRO-1 would seem cheaper or dearer than the sum it replaces."""
    assert LINKS.reduce(LARGE, ACROSS) == pytest.approx(2 * LINKS.gather(LARGE, ACROSS), rel=0.01)


def test_small_sums_over_many_devices_go_by_trees():
    """Otherwise a scalar over 1,024 devices would take the hops of a ring."""
    assert LINKS.reduce(8, Group(1024, 8)) < LINKS.gather(8, Group(1024, 8)) / 10


def test_one_device_communicates_nothing():
    """Otherwise axes of size 1 would cost time."""
    alone = Group(1, 1)
    assert [f(LARGE, alone) for f in (LINKS.gather, LINKS.reduce, LINKS.exchange, LINKS.send)] == [0.0] * 4


def test_axes_are_placed_from_the_inside_out():
    """Otherwise tensor parallelism would be put across the network."""
    groups = place({"tensor": 4, "seq": 2, "data": 4, "pipe": 2}, 8)
    assert groups == {"tensor": Group(4, 4), "seq": Group(2, 2), "data": Group(4, 1), "pipe": Group(2, 1)}
    assert place({"tensor": 2, "data": 64}, 72)["data"] == Group(64, 36)
