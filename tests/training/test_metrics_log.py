"""Numbers on disk: each step once, whatever happened before."""

import json

from jaxpar.training.metrics_log import MetricsLog, read_records
from tests.training.fakes import make_loop, record


def write(directory, start, stop):
    log = MetricsLog(directory)
    loop = make_loop(step=start)
    log.on_start(loop)
    for step in range(start + 1, stop + 1):
        log.on_record(loop, step, record(loss=100.0 * start + step))
    log.close()


def test_a_resumed_run_drops_the_records_past_its_checkpoint(tmp_path):
    """Otherwise steps done twice would stand twice, and a plot would run backwards."""
    write(tmp_path, 0, 5)
    write(tmp_path, 3, 6)
    records = read_records(tmp_path)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == [1, 2, 3, 304, 305, 306]


def test_a_last_line_cut_off_by_a_kill_is_dropped(tmp_path):
    """Otherwise a killed run could not be resumed."""
    write(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    write(tmp_path, 2, 3)
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2, 3]


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path):
    """Otherwise strict readers would stop at the very step that matters."""
    log = MetricsLog(tmp_path)
    loop = make_loop()
    log.on_start(loop)
    log.on_record(loop, 1, record(loss=float("nan")))
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: name)["loss"] is None


def test_tensorboard_events_are_written(tmp_path):
    """Otherwise TensorBoard would show an empty run."""
    write(tmp_path, 0, 2)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"validation" not in events.read_bytes() and b"loss" in events.read_bytes()
