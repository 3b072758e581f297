"""Known faults of pipelines: tied ends that drift, few microbatches that hang, rows and layers that get lost."""

import time
from dataclasses import replace
from math import prod

import jax
import numpy as np
import optax
import pytest

from experiments.parity_table import make_batch
from jaxpar import Plan, PlanError, Program
from jaxpar.pipeline.layers import balanced
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from models.llama import LlamaConfig
from tests.parity.references import assert_equals_one_device, one_device_run

# One that hangs is a failure.
pytestmark = pytest.mark.timeout(60)

CONFIG = LlamaConfig(61, 4, 32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64)
SCHEDULES = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "zero_bubble_v": {"pipeline": "zero_bubble_v"},
}
LENGTH = 16


def on(plan, config=CONFIG, rate=0.1):
    return run_on_enough_devices(Program(config.build, optax.sgd(rate), plan))


def trained(plan, steps=20):
    """-> the run, its state, and every step's gradient norm."""
    # A low rate: at 0.1, training itself makes differences of rounding a hundred times larger.
    run, norms = on(plan, replace(CONFIG, tie_embeddings=True), rate=0.02), []
    state = run.init(0)
    for step in range(steps):
        state, metrics = run.step(state, run.put(make_batch("uneven", 8, 61, LENGTH, seed=step)))
        norms.append(float(metrics["grad_norm"]))
    return run, state, norms


def test_a_tied_embedding_has_one_copy_that_learns_from_both_ends():
    """Megatron-LM 844: otherwise the first and the last stage each train a table of their own.

    The table's rows lie in slices over the stages, which embed and score every microbatch together: there is no second
    copy that could drift, in the state, in a checkpoint, or in the gradient's norm.
    """
    run, state, norms = trained(Plan("data=2,pipe=4", microbatches=4))
    alone, want, expected_norms = trained(Plan("data=1"))
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    found, want = (jax.device_get(r.to_logical(s).params) for r, s in ((run, state), (alone, want)))
    assert [path for path, x in found.items() if 61 in x.shape] == ["embedding"]
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-4 * np.abs(x).max(), err_msg=path)
    slices = {shard.index[0].start or 0: shard.data.shape for shard in state.params["embedding"].addressable_shards}
    assert slices == {0: (16, 32), 16: (16, 32), 32: (16, 32), 48: (16, 32)}
    copies = {}
    for shard in state.params["embedding"].addressable_shards:
        copies.setdefault(shard.index[0].start, set()).add(np.asarray(shard.data).tobytes())
    assert all(len(bits) == 1 for bits in copies.values())


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("1f1b", 3), ("gpipe", 1), ("interleaved", 1), ("interleaved", 3), ("zero_bubble", 3), ("zero_bubble_v", 1)],
)
def test_fewer_microbatches_than_stages_equal_one_device(schedule, microbatches):
    """torchtitan 775: otherwise a stage waits for a microbatch that never comes, or a guard forbids a legal case."""
    layers = 8 if schedule in ("interleaved", "zero_bubble_v") else 4
    plan = Plan("pipe=4", microbatches=microbatches, **SCHEDULES[schedule])
    assert_equals_one_device(replace(CONFIG, num_layers=layers), plan, ["uneven"], rows=12, length=LENGTH)


@pytest.mark.parametrize(
    ("schedule", "least"), [("zero_bubble", 7), ("zero_bubble_v", 4)], ids=["zero_bubble", "zero_bubble_v"]
)
def test_too_few_microbatches_to_fill_are_refused_at_once_with_the_rule(schedule, least):
    """Otherwise a schedule without what it promises is built, or a stage waits for ever."""
    started = time.monotonic()
    for microbatches in range(1, least):
        with pytest.raises(PlanError, match=rf"needs at least {least} microbatches, found {microbatches}"):
            Plan("pipe=4", microbatches=microbatches, pipeline=schedule, fill=True)
    Plan("pipe=4", microbatches=least, pipeline=schedule, fill=True)
    assert time.monotonic() - started < 5


def test_rows_that_do_not_divide_into_microbatches_are_refused_with_the_numbers():
    """pytorch 126600: otherwise rows are dropped, or the error is a shape deep in a schedule."""
    run = on(Plan("pipe=2", microbatches=3))
    with pytest.raises(PlanError, match=r"8 rows do not divide into .* = 3 parts; give a positive multiple of 3"):
        run.put(make_batch("ones", 8, 61, LENGTH))


def test_evaluation_counts_every_row_of_a_short_last_batch():
    """Otherwise the last 5 rows are dropped, or what fills them up to 8 is counted."""
    run, alone = on(Plan("pipe=2", microbatches=4)), one_device_run(CONFIG)
    batch = make_batch("uneven", 13, 61, LENGTH)
    parts = [{name: x[cut] for name, x in batch.items()} for cut in (slice(0, 8), slice(8, 13))]
    found, want = (r.evaluate(r.init(0), parts) for r in (run, alone))
    assert found["rows"] == 13 and run.evaluate(run.init(0), parts[1:])["rows"] == 5
    assert found == pytest.approx(want, rel=1e-6)


CUTS = {(30, 4): [8, 8, 7, 7], (10, 3): [4, 3, 3], (7, 2): [4, 3], (62, 4): [16, 16, 15, 15]}


@pytest.mark.parametrize(("layers", "stages"), CUTS)
def test_layers_that_divide_unevenly_are_all_there_once(layers, stages):
    """Megatron-LM 1304: otherwise 30 layers on 4 stages are 28, and a smaller model trains."""
    assert list(balanced(layers, stages)) == CUTS[layers, stages]
    run = on(Plan(f"pipe={stages}"), replace(CONFIG, num_layers=layers))
    (held,) = {p.layers for p in run.placements.values() if p.layers is not None}
    by_stage = [[depth for depth in held.depths(stage)[0] if depth >= 0] for stage in range(stages)]
    assert [len(depths) for depths in by_stage] == CUTS[layers, stages]
    assert [depth for depths in by_stage for depth in depths] == list(range(layers))
    sizes = {path: prod(x.shape) for path, x in run.abstract_logical_state.params.items()}
    alone = on(Plan("data=1"), replace(CONFIG, num_layers=layers)).abstract_logical_state.params
    assert sizes == {path: prod(x.shape) for path, x in alone.items()}


def test_fewer_layers_than_stages_are_refused():
    """Otherwise stages would be built without layers."""
    with pytest.raises(PlanError, match="has 5 layers for 8 stages"):
        on(Plan("pipe=8"), replace(CONFIG, num_layers=5))


def test_six_layers_on_four_stages_equal_one_device():
    """Otherwise what fills up the shorter stages is played."""
    config = replace(CONFIG, num_layers=6)
    run, alone = on(Plan("pipe=4", microbatches=2), config), one_device_run(config)
    batch = make_batch("uneven", 12, 61, LENGTH)
    assert run.evaluate(run.init(0), [batch]) == pytest.approx(alone.evaluate(alone.init(0), [batch]), rel=1e-6)
    assert compare(*run_loss_and_grads(run, batch), *run_loss_and_grads(alone, batch)) == []
