"""`jaxpar compile` as it is typed."""

import json

import pytest

from jaxpar.cli.entry import main
from jaxpar.estimate.sizes import parse_size, size

SCRIPT = ["compile", "experiments/pretrain_lm.py", "--cluster", "1x8xcpu", "--plan.mesh", "data=4,tensor=2"]


def test_the_status_says_whether_the_step_fits(capsys):
    """Otherwise a script that asks before it queues for a cluster would have to read tables."""
    assert main([*SCRIPT, "--fits", "80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["memory"].values()) == found["peak_bytes"]
    assert {c["axis"] for c in found["collectives"]} == {"data", "tensor"} and found["lint"] == []
    assert len(found["largest"]) == 10 and any("models/" in buffer["source"] for buffer in found["largest"])

    assert main([*SCRIPT, "--fits", f"{found['peak_bytes'] - 1}B", "--plan.zero", "0"]) == 3
    out, err = capsys.readouterr()
    assert "does not fit: the peak is" in err
    assert all(text in out for text in ("peak by kind", "largest buffers alive at the peak", "no findings"))


def test_a_users_mistake_is_one_message_and_status_2(capsys):
    """Otherwise it would look like a step that does not fit, or like a bug."""
    for arguments, message in (
        (["--fits", "80XB"], "needs a number above 0 and a unit"),
        (["--cluster", "1x8xh10"], "unknown kind of device 'h10'"),
        (["--simulate", "8"], "compile starts no run"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*SCRIPT, *arguments])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and message in error and "Traceback" not in error


def test_sizes_are_read_as_people_write_them():
    """Otherwise 80 GB would be 80 GiB, 7 % more than there is."""
    assert [parse_size(text) for text in ("80GB", "1.5 GiB", "7", "2kb")] == [80 * 10**9, 3 * 2**29, 7, 2000]
    assert [size(n) for n in (7, 1536, 80 * 2**30)] == ["7 B", "1.50 KiB", "80.00 GiB"]
