"""A step's time: its parts, and what changes them."""

from dataclasses import replace

import pytest

from jaxpar.errors import PlanError
from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import device
from jaxpar.estimate.layout import DOTS, FULL, Layout, Remat
from jaxpar.estimate.links import Group, Links
from jaxpar.estimate.matmul import Rates
from jaxpar.estimate.pipe_time import schedule_slots
from jaxpar.estimate.system import JAXPAR, System
from jaxpar.estimate.time import estimate
from jaxpar.estimate.work import transformer
from jaxpar.pipeline import Costs, build
from jaxpar.plan import Capacity, Pipeline, Plan, Zero

H100 = device("h100")
# Fused kernels, everything overlapped, stages that do not wait for each other's tick.
IDEAL = System("ideal", overlap_tensor=True)
SIZES = dict(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, gated=True, vocab=128256)
LLAMA = transformer(mlp=14336, **SIZES)
MIXTRAL = transformer(mlp=14336, experts=8, active=2, expert_mlp=14336, **SIZES)
BASE = Layout(length=8192, rows=1, microbatches=8)


def total(layout: Layout = BASE, work=LLAMA, gpu=H100, system=IDEAL, **constants) -> float:
    return estimate(work, layout, gpu, system, replace(Constants(), **constants)).total


def test_parts_add_up_to_the_step():
    """Otherwise a planner's stacked bars would not be as long as the step."""
    step = estimate(LLAMA, replace(BASE, data=8, tensor=4, pipe=2, seq=2, zero=1, shard=8), H100)
    assert step.total == pytest.approx(sum(step.parts.values())) and min(step.parts.values()) >= 0
    assert all(step.parts[axis] > 0 for axis in ("tensor", "pipe", "data", "bubble", "optimizer"))


def test_one_device_computes_its_flops_at_the_sustained_rate():
    """Otherwise units would be wrong somewhere: seconds of a model too large to overlook."""
    step = estimate(LLAMA, BASE, H100, IDEAL)
    flops = LLAMA.flops_per_token(8192) * 8 * 8192
    ideal = flops / Rates(H100, Constants()).peak("bfloat16")
    assert ideal < step.total < 1.4 * ideal
    assert step.tensor == step.data == step.pipe == step.seq == step.expert == step.bubble == step.spread == 0
    assert step.backward == pytest.approx(2 * step.forward, rel=0.15)


def test_a_device_twice_as_fast_halves_the_compute():
    """Otherwise rates would enter twice, or not at all."""
    twice = replace(
        H100, bf16_flops=2 * H100.bf16_flops, memory_bandwidth=2 * H100.memory_bandwidth, f32_flops=2 * H100.f32_flops
    )
    slow, fast = (total(gpu=gpu, kernel_seconds=0.0, step_seconds=0.0) for gpu in (H100, twice))
    assert fast == pytest.approx(slow / 2)


def test_recomputing_a_forward_costs_a_forward():
    """Otherwise remat would look free, and be chosen always."""
    none, full, dots = (estimate(LLAMA, replace(BASE, remat=r), H100, IDEAL) for r in (BASE.remat, FULL, DOTS))
    assert none.recompute == 0 and full.recompute == pytest.approx(full.forward)
    assert 0 < dots.recompute < full.recompute / 2


def test_more_microbatches_shrink_the_bubble_by_the_formula():
    """Otherwise the pipeline's price would not be (p - 1) / (v m)."""
    for chunks in (1, 2):
        for m in (8, 64):
            layout = replace(BASE, pipe=4, microbatches=m, chunks=chunks)
            step = estimate(replace(LLAMA, vocab=0), layout, H100, IDEAL, Constants())
            work = step.forward + step.backward + step.head + step.contention
            assert step.bubble / work == pytest.approx(3 / (m * chunks), rel=0.05)


def test_the_bubble_of_jaxpars_own_step_is_the_schedules():
    """Otherwise plans would be ranked by bubbles that the executor does not have."""
    layout = replace(BASE, pipe=4, microbatches=8)
    found = {}
    for name, fill in (("1f1b", False), ("gpipe", False), ("zero_bubble", True)):
        step = estimate(replace(LLAMA, vocab=0), replace(layout, schedule=name, fill=fill), H100, JAXPAR)
        found[name] = step.bubble / (step.forward + step.backward)
    assert found["1f1b"] == pytest.approx(3 / 8, rel=0.02) and found["gpipe"] == pytest.approx(3 / 8, rel=0.02)
    assert found["zero_bubble"] < 0.7 * found["1f1b"]


@pytest.mark.parametrize(
    ("name", "chunks", "fill"),
    [
        ("gpipe", 1, False),
        ("1f1b", 1, False),
        ("interleaved", 3, False),
        ("zero_bubble", 1, True),
        ("zero_bubble_v", 1, False),
    ],
)
@pytest.mark.parametrize("microbatches", [9, 29, 40])
def test_long_schedules_are_counted_as_if_they_were_built(name, chunks, fill, microbatches):
    """Otherwise 10,000 plans would take minutes, or long ones get another schedule's time."""
    schedule = build(name, 4, microbatches, chunks, fill=fill)
    slots, in_flight = schedule_slots(name, 4, microbatches, chunks, fill)
    costs = Costs(1.0, 1.25, 0.75)
    seconds = sum(n * max(costs.of(kind, schedule.split) for kind in kinds) for kinds, n in slots.items())
    assert seconds / schedule.chunks == pytest.approx(schedule.time(costs))
    assert in_flight == max(schedule.peak_live())


def test_an_illegal_schedule_raises_as_it_does_for_a_run():
    """Otherwise the planner would rank plans that cannot be run."""
    with pytest.raises(PlanError, match="at least 7 microbatches"):
        estimate(LLAMA, replace(BASE, pipe=4, microbatches=2, schedule="zero_bubble", fill=True), H100)


def test_a_head_on_the_last_stage_makes_all_wait_and_a_shared_one_does_not():
    """Otherwise what a vocabulary costs a pipeline would not depend on where it lies."""
    layout = replace(BASE, pipe=8, microbatches=64)
    alone, shared = (estimate(LLAMA, layout, H100, s) for s in (IDEAL, replace(IDEAL, lockstep=True)))
    assert alone.bubble > 1.5 * shared.bubble


def test_each_stack_is_padded_to_its_own_longest_part():
    """Otherwise a model of two stacks that do not divide would be promised a pipeline that it does not get."""
    layout, ours = replace(BASE, pipe=8, microbatches=64), replace(IDEAL, lockstep=True)
    (layer, layers), odd = LLAMA.layers[0], 11
    assert layers % 8 == 0
    two = replace(LLAMA, layers=((layer, odd), (layer, layers - odd)))
    one, cut = (estimate(work, layout, H100, ours) for work in (LLAMA, two))
    longest = -(-odd // 8) + -(-(layers - odd) // 8)
    assert longest > layers // 8 and cut.bubble - one.bubble > 0.8 * one.forward * (longest / (layers // 8) - 1)


def test_zero_3_across_a_slow_network_shows_and_inside_a_machine_does_not():
    """Otherwise HSDP would never be worth it."""
    layout = replace(BASE, data=64, shard=64, zero=3, microbatches=16, length=2048)
    slow = replace(H100, slow=replace(H100.slow, bandwidth=1e9))
    whole, within = (estimate(LLAMA, replace(layout, shard=n), slow, IDEAL).data for n in (64, 8))
    assert within < whole / 3


def test_zero_2_gathers_once_a_step_and_zero_3_in_every_microbatch():
    """Otherwise the price of sharded parameters would be that of sharded gradients."""
    slow = replace(H100, slow=replace(H100.slow, bandwidth=1e9))
    found = {}
    for zero in (2, 3):
        layout = replace(BASE, data=64, shard=64, zero=zero, length=2048)
        found[zero] = [estimate(LLAMA, replace(layout, microbatches=m), slow, IDEAL).data for m in (8, 16)]
    assert found[3][0] > 1.5 * found[2][0]
    assert found[3][1] == pytest.approx(2 * found[3][0], rel=0.1)


def test_gradients_reduced_after_the_step_show_and_overlapped_ones_mostly_do_not():
    """Otherwise when a system reduces would not matter."""
    layout = replace(BASE, data=8, zero=1, shard=8)
    after, over = (estimate(LLAMA, layout, H100, replace(IDEAL, overlap_gradients=o)) for o in (False, True))
    assert over.data < after.data / 5 and over.contention > after.contention
    links, group = Links(H100, Constants()), Group(8, 8)
    moved = sum(links.gather(LLAMA.parameters * size, group) for size in (IDEAL.reduce_bytes, IDEAL.update_bytes))
    assert after.data == pytest.approx(moved, rel=1e-3)


def test_zero_shards_the_optimizer():
    """Otherwise ZeRO-1's gain in time would be lost."""
    once = replace(BASE, data=8, shard=8, microbatches=1)
    whole, sharded = (estimate(LLAMA, replace(once, zero=z), H100).optimizer for z in (0, 1))
    assert sharded == pytest.approx(whole / 8)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_further_microbatch_adds_its_gradients_to_a_sum(zero):
    """Otherwise many small microbatches would look as cheap as few. From ZeRO-2 on the sum is of shards."""
    layout = replace(BASE, data=8, shard=8, zero=zero)
    one, three = (estimate(LLAMA, replace(layout, microbatches=m), H100).optimizer for m in (1, 3))
    held = LLAMA.parameters / (8 if zero >= 2 else 1)
    read_and_written = 2 + 4 + 4
    bandwidth = H100.memory_bandwidth * Constants().memory
    assert three - one == pytest.approx(2 * held * read_and_written / bandwidth)


def test_sequence_sharded_norms_save_time():
    """Otherwise nothing would speak for them but memory."""
    whole, cut = (total(replace(BASE, tensor=8, split_norms=s)) for s in (False, True))
    assert cut < whole


def test_keys_by_a_ring_hide_behind_attention_where_ulysses_shows():
    """Otherwise all ways to split positions would cost alike."""
    layout = replace(BASE, seq=8, length=65536)
    ring, ulysses, gathered = (
        estimate(LLAMA, replace(layout, attention=a), H100, IDEAL).seq for a in ("ring", "ulysses", "allgather")
    )
    assert ring == 0 and min(ulysses, gathered) > 0


def test_uneven_experts_and_distant_ones_cost_time():
    """Otherwise expert parallelism would look free."""
    layout = replace(BASE, data=8, zero=1, shard=8)
    alone, spread = (estimate(MIXTRAL, replace(layout, expert=e), H100, IDEAL) for e in (1, 8))
    assert alone.expert == 0 < spread.expert
    uneven = estimate(MIXTRAL, layout, H100, replace(IDEAL, imbalance=2.0))
    assert uneven.forward > 1.3 * alone.forward
    assert (
        estimate(MIXTRAL, replace(layout, capacity=1.0), H100, replace(IDEAL, imbalance=2.0)).forward < uneven.forward
    )
    # A token meets 2 of 8 experts: far less work than all parameters would make.
    assert total(work=MIXTRAL) < 2.5 * total()


def test_many_devices_wait_for_the_slowest_of_them():
    """Otherwise weak scaling would be perfect."""
    few, many = (estimate(LLAMA, replace(BASE, data=n, zero=1, shard=n), H100, IDEAL).spread for n in (8, 1024))
    assert 0 < few < many < 2.5 * few


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            Plan("data=-1,tensor=8", zero=Zero(3, within_node=True), remat="full"),
            {"data": 8, "shard": 1, "remat": FULL},
        ),
        (Plan("data=4,expert=2,tensor=8", experts=Capacity(1.25)), {"data": 8, "expert": 2, "capacity": 1.25}),
        (
            Plan("data=-1,pipe=4", pipeline=Pipeline("interleaved", 2), microbatches=8),
            {"pipe": 4, "chunks": 2, "schedule": "interleaved", "rows": 2, "data": 16},
        ),
        (Plan("data=-1", remat="named:attention"), {"remat": replace(FULL, attention=False)}),
        (
            Plan("data=-1", remat="named:qkv,out"),
            {"remat": Remat(frozenset({"up", "down", "other"}), attention=True, elementwise=True)},
        ),
    ],
)
def test_a_plan_becomes_a_layout(plan, expected):
    """Otherwise the estimate would be of another plan."""
    layout = Layout.of(plan, rows=256, length=8192, devices=64, devices_per_node=8)
    assert layout.devices == 64
    assert {name: getattr(layout, name) for name in expected} == expected
    assert estimate(MIXTRAL if plan.capacity else LLAMA, layout, H100).total > 0


@pytest.mark.parametrize(
    "name, chunks, fill",
    [("gpipe", 1, False), ("1f1b", 1, False), ("interleaved", 3, False), ("zero_bubble", 1, False),
     ("zero_bubble", 1, True), ("zero_bubble_v", 1, False), ("zero_bubble_v", 1, True)],
)  # fmt: skip
def test_many_stages_are_counted_from_few_as_the_schedule_has_them(name, chunks, fill):
    """Otherwise deep pipelines would be estimated by a formula that their schedules do not follow."""
    for stages in (9, 12):
        for m in (stages, stages + 3, 2 * stages, 2 * stages + 5, 3 * stages):
            if fill and m < 2 * stages:
                continue
            built = build(name, stages, m, chunks, fill=fill)
            kinds: dict = {}
            for tick, _, slot, task in built.entries():
                kinds.setdefault((tick, slot), set()).add(task.kind)
            counted = [frozenset(found) for found in kinds.values()]
            slots, in_flight = schedule_slots(name, stages, m, chunks, fill)
            assert slots == {found: counted.count(found) for found in set(counted)}
            assert in_flight == max(built.peak_live())
