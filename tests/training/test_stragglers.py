"""The process that the others wait for."""

import numpy as np
import pytest

from jaxpar.training.stragglers import Stragglers
from tests.training.fakes import make_loop, record


def look(times, step_seconds=0.2):
    """What is said and recorded when these are the processes' own times in a step."""
    said, records = [], []
    loop = make_loop(step=10)
    loop.callbacks = [type("Recorder", (), {"on_record": lambda self, loop, step, r: records.append(r)})()]
    others = [[t, 0.5] for t in times[1:]]
    stragglers = Stragglers(every=10, gather=lambda mine: np.asarray([mine, *others]), say=said.append)
    for step in range(1, 10):
        stragglers.on_record(loop, step, record(seconds=step_seconds, host_seconds=times[0], data_wait=0.0))
    stragglers.on_step(loop)
    return said, records


def test_the_slowest_process_is_named_with_its_time():
    """Otherwise one would look at every log of a hundred to find which node reads its data slowly."""
    said, (found,) = look([0.01, 0.01, 0.15, 0.012])
    assert said == [
        "step 10: process 2 takes 0.15 s of a step on its host (0.1 s of them waiting for rows), the middle process "
        "0.01 s; the others wait for it"
    ]
    assert found["slowest_process"] == 2 and found["slowest_over_median"] == pytest.approx(0.15 / 0.01, rel=1e-3)
    assert found["slowest_data_wait"] == 0.5


@pytest.mark.parametrize("times", [[0.1, 0.11, 0.12], [0.0001, 0.0001, 0.001]])
def test_small_differences_are_recorded_and_not_spoken_of(times):
    """Otherwise the log would be full of what matters to nobody."""
    said, records = look(times)
    assert not said and len(records) == 1
