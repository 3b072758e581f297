"""What a person sees while a run goes."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxpar.training.progress import ProgressLog, bar, clock, short, status
from tests.training.fakes import make_loop, record

FIELDS = {
    "step": "123/4567",
    "loss": "loss 2.345",
    "validation": "val 2.401",
    "norm": "grad norm 0.51",
    "rate": "lr 3.00e-04",
    "speed": "45.2k tokens/s/device",
    "flops": "0.013 TFLOP/s/device",
    "mfu": "MFU 41.3%",
    "wait": "data wait 2%",
    "skipped": "2 skipped",
    "eta": "0:42 left",
}


@given(width=st.integers(0, 200), done=st.floats(0, 1))
def test_the_status_fits_any_terminal(width, done):
    """Otherwise a narrow terminal would fill with wrapped copies of one line."""
    assert len(status(FIELDS, done, width)) <= width


def test_a_narrow_terminal_keeps_what_matters_most():
    """Otherwise it would show the speed and hide the loss."""
    assert status(FIELDS, 0.5, 40) == "123/4567  loss 2.345  2 skipped"
    wide = status(FIELDS, 0.5, 200)
    assert all(text in wide for text in FIELDS.values()) and "━" in wide


def run(console, steps=3):
    log = ProgressLog(bigram=2.5, console=console)
    loop = make_loop(steps=steps)
    log.on_start(loop)
    for step in range(1, steps + 1):
        log.on_record(loop, step, record(skipped=float(step == 2)))
    log.on_record(loop, steps, {"validation_loss": 2.25})
    log.on_end(loop)
    log.close()
    return console.file.getvalue()


def test_without_a_terminal_plain_lines_are_printed():
    """Otherwise a log file would fill with cursor movements."""
    out = run(Console(file=io.StringIO(), width=30))
    assert "\x1b" not in out and "\r" not in out
    last = out.splitlines()[-2:]
    assert last[0].startswith("3/3  loss 2.000") and "12.3k tokens/s/device" in last[0] and "1 skipped" in last[0]
    assert last[1] == "step 3/3  validation loss 2.2500 (bigram entropy 2.5000)"


def test_on_a_terminal_the_live_line_ends_with_the_last_step():
    """Otherwise the screen would keep an old number, or lose its cursor."""
    out = run(Console(file=io.StringIO(), width=40, force_terminal=True))
    assert "3/3" in out and out.rstrip().endswith("\x1b[?25h")


def test_what_a_record_lacks_is_not_shown():
    """Otherwise a device without a known peak would show an MFU, or the line would fail."""
    console = Console(file=io.StringIO())
    out = run(console)
    assert "MFU" not in out and "lr" not in out
    log = ProgressLog(console=console)
    log.on_start(loop := make_loop(steps=1))
    log.on_record(loop, 1, record(mfu=0.413, learning_rate=3e-4, data_wait=0.02, grad_norm=0.51))
    line = console.file.getvalue().splitlines()[-1]
    assert all(FIELDS[name] in line for name in ("mfu", "rate", "wait", "norm"))


def test_what_the_guard_costs_is_said_once():
    """Otherwise nobody could tell whether it is worth its time, or every check would be a line."""
    console = Console(file=io.StringIO(), width=200)
    log, loop = ProgressLog(console=console), make_loop(steps=9)
    log.on_start(loop)
    for step in (4, 8):
        log.on_record(loop, step, {"guard_seconds": 0.0031, "guard_share": 0.0002})
    assert console.file.getvalue().count("compared in 3.1 ms, 0.02% of the time between") == 1


def test_numbers_are_short():
    """Otherwise speed and time would not fit a line."""
    assert [short(n) for n in (940, 12_345, 4.56e6, 7e9)] == ["940", "12.3k", "4.56M", "7G"]
    assert [clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
    assert bar(0.5, 4) == "━━╌╌" and bar(2.0, 2) == "━━"
