"""What waits in host memory changes no number, and really lies there in the H100 program."""

import re
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import TOY, make_batch
from jaxpar import Plan, Program, token_shapes
from jaxpar.estimate.compile import StepReport, report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import compiler_options, topology_devices
from jaxpar.offload import SMALL, worth_moving
from jaxpar.run import Run
from jaxpar.testing import run_loss_and_grads, run_on_enough_devices
from jaxpar.training.average import parameter_average, to_averaged
from jaxpar.training.guard import Replicas
from models.llama import LlamaConfig

MODEL = replace(TOY, num_layers=2)
BOTH = ("optimizer", "activations")


def make_run(plan: Plan) -> Run:
    optimizer = optax.chain(optax.adamw(1e-2), parameter_average(0.9))
    return run_on_enough_devices(Program(MODEL.build, optimizer, plan))


def after_three_steps(plan: Plan) -> list[np.ndarray]:
    """Losses, parameters, moments (and with them the gradients) and averages."""
    run = make_run(plan)
    state, losses = run.init(0), []
    for _ in range(3):
        state, metrics = run.step(state, run.put(make_batch("uneven", 8, MODEL.vocab_size)))
        losses.append(metrics)
    return jax.tree.leaves(jax.device_get((losses, state.params, state.opt_state)))


def waiting(state) -> list[bool]:
    return [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state.opt_state)]


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [("data=1", 0), ("data=2,tensor=2", 1), ("data=2,tensor=2", 3), ("data=2,pipe=2", 0)],
)
def test_training_is_the_same_to_the_last_bit(mesh, zero):
    """Otherwise what is fetched is not what was put away."""
    plan = Plan(mesh, zero=zero, microbatches=2)
    pairs = zip(after_three_steps(plan), after_three_steps(replace(plan, offload=BOTH)), strict=True)
    assert all(np.array_equal(here, there) for here, there in pairs)


@pytest.mark.parametrize("remat", ["dots", "full", "named:attention,mlp"])
def test_whatever_a_layer_saves_can_wait(remat):
    """Otherwise offloading would work with one policy of remat alone."""
    plan = Plan("data=2,tensor=2", zero=3, remat=remat, precision="bfloat16")
    batch = make_batch("uneven", 8, MODEL.vocab_size)
    (loss, grads), (expected_loss, expected) = (
        run_loss_and_grads(make_run(p), batch) for p in (replace(plan, offload=("activations",)), plan)
    )
    assert loss == expected_loss
    assert all(np.array_equal(grads[path], g) for path, g in expected.items())


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(Plan("data=4", offload=("optimizer",)))


def test_large_state_waits_on_the_host_and_counters_stay(run):
    """Otherwise nothing is saved, or every step waits for a copy of four bytes."""
    state = run.init(0)
    sizes = [x.nbytes for x in jax.tree.leaves(state.opt_state)]
    assert waiting(state) == [size >= SMALL for size in sizes]
    assert min(sizes) == 4 and sum(waiting(state)) >= 3 * 8
    state, _ = run.step(state, run.put(make_batch("ones", 8, MODEL.vocab_size)))
    assert waiting(state) == [size >= SMALL for size in sizes]
    assert not any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state.params))
    assert waiting(run.to_logical(state)) == waiting(state)


def test_a_step_gives_its_state_away_and_a_skipped_one_keeps_it(run):
    """Otherwise host memory is needed twice, or a bad step would overwrite what waits there."""
    old, before = run.init(0), jax.device_get(run.init(0).opt_state)  # a view from the host would keep `old` alive
    batch = make_batch("ones", 8, MODEL.vocab_size)
    new, metrics = run.step(old, run.put(batch | {"weights": np.zeros_like(batch["weights"])}))
    assert float(metrics["skipped"]) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(old.opt_state))
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, new.opt_state)), strict=True))


def test_what_reads_the_state_finds_it_on_the_host(run):
    """Otherwise averages, or the comparison of replicas, would end a run that offloads."""
    state = run.init(0)
    for _ in range(2):
        state, _ = run.step(state, run.put(make_batch("ones", 8, MODEL.vocab_size)))
    assert any("mu" in name for name in Replicas(run).axes) and Replicas(run).differences(state) == []
    averaged = to_averaged(run)(state).params
    average = state.opt_state[1].average
    assert all(np.array_equal(averaged[path], x) for path, x in average.items())


LARGE = LlamaConfig(1024, 4, 512, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=2048)


@lru_cache
def h100_step(**plan) -> tuple[Run, StepReport, str]:
    devices = topology_devices(Cluster.parse("1x8xh100"))
    run = Program(LARGE.build, optax.adam(1e-3), Plan(precision="bfloat16", **plan)).on(devices)
    step = run.lower(token_shapes(16, 2048)).compile(compiler_options=compiler_options("gpu"))
    return run, report(step, run.mesh), step.as_text()


def moments(run: Run) -> int:
    """Bytes of those on one device that are worth moving."""
    leaves = jax.tree.leaves(run.abstract_state.opt_state)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * 4 for x in leaves if worth_moving(x))


def test_the_h100_program_keeps_the_moments_on_the_host():
    """Otherwise they are in device memory after all, or all of them come back at once."""
    run, kept, _ = h100_step(mesh="data=4,tensor=2", zero=3)
    _, away, text = h100_step(mesh="data=4,tensor=2", zero=3, offload=("optimizer",))
    assert away.host_bytes == moments(run)
    assert abs(kept.peak_bytes - away.peak_bytes - moments(run)) < 2**16  # the order of copies aligns temporaries anew
    assert "in host" in away.table() and "in host" not in kept.table()
    events = re.findall(r" copy-(start|done)\(", text)
    # The next leaf is under way while one is updated, and never much more.
    flying = np.cumsum([1 if event == "start" else -1 for event in events])
    assert len(events) >= 2 * 12 and 2 <= flying.max() <= 4, events


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_h100_program_keeps_what_layers_save_on_the_host(remat):
    """Otherwise activations stay in device memory, or every layer waits for a copy."""
    plan = {"mesh": "data=4,tensor=2", "zero": 3} | ({"remat": remat} if remat != "none" else {})
    _, kept, _ = h100_step(**plan)
    _, away, text = h100_step(**plan, offload=("activations",))
    input_bytes = 16 // 4 * 2048 * LARGE.embed_dim * 2 * LARGE.num_layers
    assert away.host_bytes == input_bytes if remat == "full" else away.host_bytes > 5 * input_bytes
    # One layer's is on its way.
    assert kept.peak_bytes - away.peak_bytes > away.host_bytes * (1 - 1 / LARGE.num_layers) - 2**16
    assert away.opaque_calls == () and away.flops == kept.flops
    assert re.search(r"dynamic-update-slice-start\S* = ", text) and re.search(r"dynamic-slice-start\S* = ", text)
