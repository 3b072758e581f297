"""The loop: what it records, how it stops, how it goes on."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import optax
import pytest

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.errors import TrainingError
from jaxpar.training.callbacks import Callback
from jaxpar.training.evaluate import Evaluate
from jaxpar.training.meter import Known
from jaxpar.training.save import Checkpoint
from jaxpar.training.trainer import train
from tests.training.tiny import LENGTH, ROWS, make_data, make_run


class Recorder(Callback):
    def __init__(self):
        self.records, self.closed = [], False

    def on_record(self, loop, step, record):
        self.records.append((step, dict(record)))

    def close(self):
        self.closed = True

    def losses(self):
        return {step: record["loss"] for step, record in self.records if "loss" in record}


class Kill(Callback):
    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step(self, loop):
        if loop.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def straight(run):
    recorder = Recorder()
    outcome = train(run, run.init(), make_data(), 6, [recorder])
    return outcome, recorder


def test_every_step_is_recorded_once_and_in_order(straight):
    """Otherwise a loss would stand at the wrong step, or the last ones would be lost with the loop."""
    outcome, recorder = straight
    assert [step for step, _ in recorder.records] == [1, 2, 3, 4, 5, 6]
    assert outcome.step == int(outcome.state.step) == 6 and outcome.signal is None and recorder.closed
    first = recorder.records[0][1]
    assert {"loss", "grad_norm", "skipped", "tokens_per_second", "tflops_per_device"} <= first.keys()
    assert first["tokens_per_second"] == pytest.approx(2 * first["tokens_per_second_per_device"])
    assert first["tokens_per_second"] == pytest.approx(ROWS * LENGTH / first["seconds"])
    assert first["tflops_per_device"] > 0 and "mfu" not in first and "learning_rate" not in first


def test_the_wait_for_rows_is_counted_as_a_share_of_the_step(run):
    """Otherwise a run that starves for data would look like one with a slow device."""

    class Slow:
        def __next__(self):
            time.sleep(0.2)
            return next(data)

    data, recorder = make_data(), Recorder()
    train(run, run.init(), Slow(), 4, [recorder])
    for step, record in recorder.records[:-1]:  # nothing is read while the last one runs
        assert 0.5 < record["data_wait"] <= 1.0, step
        assert record["host_seconds"] <= record["seconds"]


@pytest.mark.parametrize(("number", "mesh"), [(signal.SIGINT, "data=2"), (signal.SIGTERM, "data=4")])
def test_a_run_ended_by_a_signal_goes_on_as_if_it_had_not_been(straight, run, tmp_path, number, mesh):
    """Otherwise Ctrl-C would lose steps, rows or the optimizer's memory, or a handler would outlive the run."""
    before = signal.getsignal(number)
    first = Recorder()
    callbacks = [first, Checkpoint(Checkpoints(tmp_path), every=100), Kill(3, number)]
    outcome = train(run, run.init(), make_data(), 6, callbacks)
    assert (outcome.step, outcome.signal) == (3, number)
    assert signal.getsignal(number) == before
    other = run if mesh == "data=2" else make_run(mesh, zero=3)
    restored, data, second = Checkpoints(tmp_path).restore(other), make_data(), Recorder()
    data.set_state(restored.data)
    train(other, restored.state, data, 6, [second])
    wanted = straight[1].losses()
    np.testing.assert_allclose(list(wanted.values()), list((first.losses() | second.losses()).values()), rtol=1e-6)
    assert list(first.losses()) == [1, 2, 3] and list(second.losses()) == [4, 5, 6]


def test_evaluation_comes_every_n_steps_and_once_at_the_end(run):
    """Otherwise the curve would lack its last point, or have it twice."""
    batches = [next(make_data())]
    for steps, expected in ((4, [2, 4]), (3, [2, 3])):
        recorder = Recorder()
        evaluate = Evaluate(lambda: {"held_out": batches}, every=2)
        outcome = train(run, run.init(), make_data(), steps, [evaluate, recorder])
        found = [(step, r["validation_loss"]) for step, r in recorder.records if "validation_loss" in r]
        assert [step for step, _ in found] == expected
        # A step's own numbers come before those of its evaluation.
        order = [(step, "validation_loss" in r) for step, r in recorder.records]
        assert order == sorted(order)
        wanted = run.evaluate(outcome.state, batches)["loss"]
        assert found[-1][1] == pytest.approx(wanted, rel=1e-6)


def test_checkpoints_come_every_n_steps_and_at_the_end(run, tmp_path):
    """Otherwise a run's last steps would be lost, or its end would save what stands there already and fail."""
    checkpoints = Checkpoints(tmp_path, keep=9)
    train(run, run.init(), make_data(), 5, [Checkpoint(checkpoints, every=2)])
    assert checkpoints.steps() == [2, 4, 5]
    state = checkpoints.restore(run).state
    train(run, state, make_data(), 5, [Checkpoint(checkpoints, every=2)])
    checkpoints = Checkpoints(tmp_path / "even", keep=9)
    train(run, run.init(), make_data(), 4, [Checkpoint(checkpoints, every=2)])
    assert checkpoints.steps() == [2, 4]


def test_a_run_that_only_skips_is_aborted_and_closes_its_callbacks():
    """Otherwise a diverged run would use up its time and learn nothing."""
    run = make_run(optimizer=optax.sgd(float("inf")))
    recorder = Recorder()
    with pytest.raises(TrainingError, match="the last 3 steps, up to step 4, were all skipped"):
        train(run, run.init(), make_data(), 50, [recorder], max_skips=3, known=Known(learning_rates=[3.0, 2.0, 1.0]))
    assert [record["skipped"] for _, record in recorder.records] == [0.0, 1.0, 1.0, 1.0]
    # A schedule counts updates, and a skipped step is none.
    assert [record["learning_rate"] for _, record in recorder.records] == [3.0, 2.0, 2.0, 2.0]
    assert recorder.closed


def test_the_second_signal_ends_the_process_at_once():
    """Otherwise a step that hangs could only be ended by kill -9."""
    code = (
        "import os, signal\n"
        "from jaxpar.training.interrupts import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert interrupts.signal == signal.SIGINT\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert ended.returncode == -signal.SIGINT and "still here" not in ended.stdout
    assert "finishing this step, then saving" in ended.stderr
