"""Batch-size warm-up: its stages, its rows, its clock."""

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.errors import ConfigError, PlanError
from jaxpar.plan import Plan
from jaxpar.training import trainer
from jaxpar.training.batch_warmup import BatchWarmup, Stage, batch_stages
from jaxpar.training.callbacks import Callback
from jaxpar.training.save import Checkpoint
from jaxpar.training.trainer import train
from tests.training.tiny import CONFIG, LENGTH, ROWS, make_data

PLAN = Plan("data=2", zero=1, microbatches=2)
# Rows of each step: 2, 2, 4, 4, 8, 8, ...; the microbatches of the last two have 4 rows, over both replicas.
STAGES = batch_stages(BatchWarmup(start_rows=2, updates=4), ROWS, PLAN)


class Watched:
    """Data that keeps the tokens it gave, and leaves out all of step `blank`."""

    def __init__(self, blank=None):
        self.data, self.blank, self.given = make_data(), blank, []
        self.resize, self.get_state, self.set_state = self.data.resize, self.data.get_state, self.data.set_state

    def __next__(self):
        batch = next(self.data)
        self.given.append(batch["tokens"])
        return batch | {"weights": 0 * batch["weights"]} if len(self.given) == self.blank else batch

    @property
    def sizes(self):
        return [len(tokens) for tokens in self.given]


class Records(Callback):
    def __init__(self):
        self.of = {}

    def on_record(self, loop, step, record):
        self.of[step] = dict(record)

    def all(self, name):
        return [record[name] for record in self.of.values()]


@pytest.fixture(scope="module")
def run():
    return jaxpar.Program(CONFIG.build, optax.adamw(1e-2), PLAN).on(jax.devices()[:2])


@pytest.fixture(scope="module")
def straight(run):
    data, records, compiled, compile_step = Watched(), Records(), [], trainer.compile_step

    def counted(run, batch):
        compiled.append((run.plan.microbatches, len(batch["tokens"])))
        return compile_step(run, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compile_step", counted)
        train(run, run.init(), data, 7, [records], stages=STAGES)
    return data, records, compiled


def test_rows_grow_by_the_factor_and_microbatches_keep_their_rows():
    """Otherwise an early stage would need more memory than the full step, or the full step would never come."""
    plan = Plan("data=2", microbatches=4)
    assert batch_stages(BatchWarmup(2, updates=6), 16, plan) == [
        Stage(0, 2, 1),
        Stage(2, 4, 1),
        Stage(4, 8, 2),
        Stage(6, 16, 4),
    ]
    assert batch_stages(BatchWarmup(4, updates=5, factor=3), 16, plan)[1:] == [Stage(2, 12, 3), Stage(5, 16, 4)]
    assert batch_stages(BatchWarmup(), 16, plan) == []


def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do():
    """Otherwise a run would fail when it comes to the stage, hours later."""
    wrong = r"steps of 40 rows .* 2 replicas .* microbatches of 48 / 2 rows; the nearest start_rows that do: 6 or 12"
    with pytest.raises(PlanError, match=wrong):
        batch_stages(BatchWarmup(10, updates=9), 48, Plan("data=2", microbatches=2))
    with pytest.raises(PlanError, match="start_rows=48 must be fewer than the 48 rows"):
        batch_stages(BatchWarmup(48, updates=9), 48, Plan("data=2"))
    with pytest.raises(PlanError, match=r"steps of 2 rows have 1 microbatches: .*fill"):
        batch_stages(BatchWarmup(2, updates=9), 16, Plan("pipe=2", pipeline="zero_bubble", fill=True, microbatches=8))
    with pytest.raises(ConfigError, match="start_rows must be 1 or more, found 0; factor must be 2 or more, found 1"):
        BatchWarmup(0, updates=9, factor=1)
    with pytest.raises(ConfigError, match="start_rows must be left alone with updates=0, which is no warm-up, found 8"):
        BatchWarmup(start_rows=8)


def test_each_stage_is_compiled_once(straight):
    """Otherwise every step would compile, or a batch meet the program of another size."""
    data, _, compiled = straight
    assert data.sizes == [2, 2, 4, 4, 8, 8, 8]
    assert compiled == [(1, 2), (1, 4), (2, 8)]


def test_the_rows_are_those_of_a_run_without_warm_up_in_the_same_order(straight):
    """Otherwise rows would be trained on twice, or never, when the batch grows."""
    plain, given = make_data(), np.concatenate(straight[0].given)
    wanted = np.concatenate([next(plain)["tokens"] for _ in range(5)])
    assert np.array_equal(given, wanted[: len(given)])


def test_tokens_and_flops_are_those_of_each_step(straight):
    """Otherwise the speed of a warm-up would be that of steps it did not make."""
    records = straight[1]
    assert records.all("rows") == straight[0].sizes
    for record in records.of.values():
        assert record["tokens_per_second"] * record["seconds"] == pytest.approx(record["rows"] * LENGTH)
    flops = [t * s for t, s in zip(records.all("tflops_per_device"), records.all("seconds"), strict=True)]
    assert flops[2] == pytest.approx(flops[3]) and flops[0] < 0.6 * flops[2] < 0.4 * flops[4]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_resumed_in_the_warm_up_goes_on_as_if_it_had_not_stopped(run, straight, tmp_path, stop):
    """Otherwise a kill in a stage, or between two, would change the rows or the size of the steps after it."""
    first, second, records = Watched(), Watched(), Records()
    train(run, run.init(), first, stop, [records, Checkpoint(Checkpoints(tmp_path), every=100)], stages=STAGES)
    restored = Checkpoints(tmp_path).restore(run)
    second.set_state(restored.data)
    train(run, restored.state, second, 7, [records], stages=STAGES)
    assert first.sizes + second.sizes == straight[0].sizes
    assert np.array_equal(np.concatenate(first.given + second.given), np.concatenate(straight[0].given))
    np.testing.assert_allclose(records.all("loss"), straight[1].all("loss"), rtol=1e-6)


def test_a_skipped_step_is_no_update_of_the_warm_up(run):
    """Otherwise batch size and learning rate, which counts updates, would drift apart."""
    data, records = Watched(blank=2), Records()
    outcome = train(run, run.init(), data, 6, [records], stages=STAGES)
    assert int(outcome.state.skipped) == 1 and records.all("skipped")[1] == 1.0
    assert data.sizes == [2, 2, 2, 4, 4, 8]
