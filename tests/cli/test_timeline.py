"""`jaxpar timeline` as it is typed."""

import json

import pytest

from jaxpar.cli.entry import main
from jaxpar.pipeline import build


def ends(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["timeline", *arguments])
    return ended.value.code


def test_a_schedule_is_printed_with_what_it_costs(capsys):
    """Otherwise one would have to run a pipeline to know its bubble."""
    assert main(["timeline", "--schedule", "zero_bubble", "--stages", "4", "--microbatches", "8", "--fill"]) == 0
    out = capsys.readouterr().out
    assert build("zero_bubble", 4, 8, fill=True).draw() in out
    assert "bubble     12.50% of the work (time 27)" in out
    assert "peak live  7 7 7 7 (at most 7) by stage, in microbatches" in out
    assert "pending W  2 4 6 7 (at most 7) by stage" in out


def test_the_bubble_follows_the_costs_and_virtual_stages(capsys):
    """Otherwise it would be that of another model."""
    command = ["timeline", "--schedule", "interleaved", "--stages", "16", "--microbatches", "64"]
    assert main([*command, "--virtual-stages", "4", "--costs.forward", "2", "--costs.backward", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{15 / (64 * 4):.2%} of the work" in out and "... ticks" in out
    assert "79 77 75 73 71 ... 57 55 53 51 49 (at most 79) by stage, in chunks of 1/4 of a stage" in out


def test_a_picture_or_a_trace_is_written_by_the_ending(tmp_path, capsys):
    """Otherwise -o would write something that no program opens."""
    for name, begins in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.json", b"{")):
        assert main(["timeline", "--schedule", "zero_bubble_v", "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)
        assert f"written to {tmp_path / name}" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_a_users_mistake_is_one_message_and_status_2(tmp_path, capsys):
    """Otherwise it would look like a bug of the program."""
    for arguments, message in (
        (["--schedule", "1f2b"], "did you mean '1f1b'?"),
        (["--schedule", "zero_bubble", "--fill", "--microbatches", "5"], "nearest legal counts are 7, 8, 9"),
        (["-o", "a.pdf"], "output must end in .svg, .png, .json, found a.pdf"),
        (["-o", str(tmp_path / "none" / "a.svg")], "there is no folder"),
        (["--costs.forward", "nan"], "costs.forward must be a finite time above 0, found nan"),
    ):
        assert ends(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
