"""Training in two real processes: the same rows and losses, one end for all, and what one process alone knows."""

import json
import random
import signal

import numpy as np
import pytest

from tests.processes.launch import start
from tests.processes.script import NAP

STEPS = list(range(1, 15))
SYLLABLES = ("do", "re", "mi", "fa", "so", "la", "ti")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with two small corpora."""
    folder, draw = tmp_path_factory.mktemp("processes"), random.Random(0)
    for name, word in (("songs", lambda: draw.choice(SYLLABLES)), ("counts", lambda: str(draw.randrange(1000)))):
        (folder / "text" / name).mkdir(parents=True)
        for i in range(12):
            (folder / "text" / name / f"{i}.txt").write_text(" ".join(word() for _ in range(30 + i)))
    return folder


def run(folder, name, processes, *arguments, **more):
    """-> (statuses, outputs, rows of each step drawn). Step -> rows of all processes, in the order of the batch."""
    for path in folder.glob("rows-*.jsonl"):
        path.unlink()
    results = start(folder, processes, "--directory", f"runs/{name}", *arguments, **more)
    drawn: dict[int, list[str]] = {}
    for i in range(processes):
        path = folder / f"rows-{i}.jsonl"
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            assert line["processes"] == processes
            drawn.setdefault(line["step"], []).extend(line["rows"])
    return [status for status, _ in results], [output for _, output in results], drawn


def records(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder, name):
    found = [(r["step"], r["loss"]) for r in records(folder, name) if "loss" in r]
    assert [step for step, _ in found] == STEPS, "each step stands there once"
    return [loss for _, loss in found]


def validation(folder, name):
    found = [r["validation_loss"] for r in records(folder, name) if "validation_loss" in r]
    assert len(found) == 2
    return found


def steps_saved(folder, name):
    return sorted(int(path.name) for path in (folder / "runs" / name / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def straight(folder):
    statuses, outputs, drawn = run(folder, "straight", 1)
    assert statuses == [0], outputs[0]
    assert list(drawn) == STEPS and len({row for rows in drawn.values() for row in rows}) > 60
    return drawn


@pytest.fixture(scope="module")
def chain(folder, straight):
    """The same run in three starts: two processes, one, two; [(statuses, outputs, rows drawn)]."""
    return [
        run(folder, "chain", 2, trouble=f"1:4:{int(signal.SIGTERM)}"),
        run(folder, "chain", 1, trouble=f"0:4:{int(signal.SIGINT)}"),
        run(folder, "chain", 2, trouble="1:1:slow", by="environment"),
    ]


def test_sigterm_to_one_process_ends_all_with_one_checkpoint_and_one_status(chain):
    """Otherwise a node that is taken away would leave the others in a collective for ever, and steps would be lost."""
    statuses, outputs, drawn = chain[0]
    assert statuses == [128 + signal.SIGTERM] * 2, "\n".join(outputs)
    # In the step after the one in which the signal came, all know of it.
    assert list(drawn) == [1, 2, 3, 4, 5]
    assert "stopped at step 5 of 14, saved; the same command goes on from there" in outputs[0]
    assert "stopped at" not in outputs[1]


def test_rows_and_losses_of_2_then_1_then_2_processes_equal_the_uninterrupted_run(chain, folder, straight):
    """Otherwise rows would be left out or come twice when nodes come and go, and nobody would see it."""
    (_, _, first), (statuses, outputs, second), (last_statuses, last_outputs, third) = chain
    assert statuses == [128 + signal.SIGINT], outputs[0]
    assert "resumes the run in runs/chain at step 5 of 14" in outputs[0]
    assert last_statuses == [0, 0], "\n".join(last_outputs)
    assert "resumes the run in runs/chain at step 9 of 14" in last_outputs[0]
    assert (list(first), list(second), list(third)) == ([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14])
    assert first | second | third == straight
    wanted, found = losses(folder, "straight"), losses(folder, "chain")
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(validation(folder, "chain"), validation(folder, "straight"), rtol=1e-6)
    assert steps_saved(folder, "chain") == [5, 9, 14]


def test_the_first_steps_loss_is_the_same_to_the_bit_on_one_process_and_two(chain, folder):
    """Otherwise the same mesh would compute something else when its devices are in two processes."""
    assert losses(folder, "straight")[0] == losses(folder, "chain")[0]


def test_the_slow_process_is_named_with_its_wait_for_rows(chain, folder):
    """Otherwise the first process would report its own numbers, and the others' slow disk would look like compute."""
    said = [line for line in chain[2][1][0].splitlines() if "process 1 takes" in line]
    assert said and "s of them waiting for rows), the middle process" in said[-1]
    assert "process 1 takes" not in chain[2][1][1]
    found = [r for r in records(folder, "chain") if "slowest_process" in r and r["step"] > 9]
    assert found and all(r["slowest_process"] == 1 and r["slowest_over_median"] > 1.5 for r in found)
    assert all(0.5 < r["slowest_data_wait"] <= 1 for r in found), NAP


def test_one_process_alone_writes_and_speaks(chain, folder):
    """Otherwise two processes would write one file, and each line would stand on the console twice."""
    silent = [line for line in chain[2][1][1].splitlines() if line and "[Gloo]" not in line]
    assert silent == []
    written = sorted({path.name.split(".")[0] for path in (folder / "runs" / "chain").iterdir()})
    assert " ".join(written) == "best checkpoints config events loss memory metrics program sharding speed"


def test_a_process_that_is_killed_ends_the_others(folder, chain):
    """Otherwise the rest of the nodes would wait for it, and be paid for, until somebody looks."""
    heartbeat = ("--heartbeat-timeout", "10")
    statuses, outputs, _ = run(folder, "killed", 2, *heartbeat, trouble=f"1:3:{int(signal.SIGKILL)}", timeout=90)
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] == -signal.SIGABRT, outputs[0]
    assert "another task died" in outputs[0]


def test_processes_with_different_configs_are_refused(folder, straight):
    """Otherwise one forgotten option on one node would be a hang, or two models in one run."""
    statuses, outputs, drawn = run(folder, "different", 2, each=[[], ["--trainer.steps", "15"]])
    assert statuses[0] == 2 and statuses[1] != 0, "\n".join(outputs)
    assert "the processes were started differently: [1] are not like process 0" in outputs[0]
    assert not drawn and not (folder / "runs" / "different").exists()
