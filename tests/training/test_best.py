"""The best checkpoint, beside the last ones."""

import numpy as np
import pytest

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.training.best import KeepBest
from jaxpar.training.callbacks import Callback
from jaxpar.training.save import Checkpoint
from jaxpar.training.trainer import train
from tests.training.tiny import make_data, make_run


class Evaluated(Callback):
    """Records these validation losses, in the steps that have one."""

    def __init__(self, losses):
        self.losses = losses

    def on_step(self, loop):
        if loop.step in self.losses:
            loop.settle()
            loop.record(loop.step, {"validation_loss": self.losses[loop.step]})


@pytest.fixture(scope="module")
def run():
    return make_run()


def test_the_best_stays_when_later_ones_are_worse(run, tmp_path):
    """Otherwise a run that overfits would have pushed its best state out by the time one looks."""
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: float("nan"), 5: 2.1}
    last = Checkpoints(tmp_path / "checkpoints", keep=2)
    train(run, run.init(), make_data(), 5, [Evaluated(losses), Checkpoint(last, every=1), KeepBest(tmp_path / "best")])
    best = Checkpoints(tmp_path / "best")
    assert best.steps() == [2] and last.steps() == [4, 5]
    outcome = train(run, run.init(), data := make_data(), 2)
    restored = best.restore(run)
    assert restored.data == data.get_state()
    for path, value in outcome.state.params.items():
        np.testing.assert_array_equal(value, restored.state.params[path])


def test_a_resumed_run_remembers_how_good_the_best_was(run, tmp_path):
    """Otherwise the first evaluation after every start would replace it."""
    callbacks = lambda losses: [Evaluated(losses), KeepBest(tmp_path)]  # noqa: E731
    first = train(run, run.init(), make_data(), 2, callbacks({2: 2.0}))
    second = train(run, first.state, make_data(), 3, callbacks({3: 2.2}))
    assert Checkpoints(tmp_path).steps() == [2]
    train(run, second.state, make_data(), 4, callbacks({4: 1.9}))
    assert Checkpoints(tmp_path).steps() == [4]
