"""A script from start to end, and what its second start does."""

import json
import os
import signal

import pytest

from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.text import TextData
from jaxpar.plan import Plan
from jaxpar.training.callbacks import Callback
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.trainer import TrainerConfig
from models.llama import LlamaConfig

MODEL = LlamaConfig(257, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """An experiment in an empty working folder, on text that repeats itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" * 8)
    return RunConfig(
        name="tiny",
        model=MODEL,
        data=TextData(paths=(".",), exclude=("runs*", "cache"), row_length=16, rows=8, eval_rows=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        plan=Plan(mesh="data=-1"),
        trainer=TrainerConfig(steps=4, evaluate_every=2, checkpoint_every=2),
    )


def start(script, line="", more=lambda directory: ()):
    return run_experiment(script, more, line.split())


def steps(directory):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [r["step"] for r in records if "loss" in r]


class Kill(Callback):
    def on_step(self, loop):
        if loop.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_was_stopped_resumes_ends_and_goes_on_further(script, tmp_path, capsys):
    """Otherwise the same command could not be given again until the run is done, on whatever mesh there is."""
    folder = tmp_path / "runs" / "tiny"
    assert start(script, more=lambda directory: [Kill()]) == 128 + signal.SIGTERM
    assert "stopped at step 3 of 4, saved; the same command goes on from there" in capsys.readouterr().out
    assert start(script, "--plan.zero 1") == 0
    out = capsys.readouterr().out
    assert "changed since this run was started: plan.zero: 0 then, 1 now" in out
    assert "resumes the run in runs/tiny at step 3 of 4" in out
    assert "done: validation loss" in out and "bigram entropy" in out
    assert steps(folder) == [1, 2, 3, 4]
    assert start(script, "--plan.zero 1") == 0
    assert "is at step 4 of 4 already; --trainer.steps N goes on" in capsys.readouterr().out
    assert start(script, "--trainer.steps 5") == 0
    assert steps(folder) == [1, 2, 3, 4, 5]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "loss.png", "checkpoints", "sharding.txt"} <= names
    with pytest.raises(SystemExit) as ended:
        start(script, "--model.mlp-dim 32 --trainer.steps 6")
    assert ended.value.code == 2
    assert "model.mlp_dim: 16 then, 32 now" in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_writes_nothing(script, tmp_path, capsys):
    """Otherwise one would have to train to learn what fits."""
    assert start(script, "--dry-run --plan.zero 3") == 0
    out = capsys.readouterr().out
    assert "blocks.mlp.up.kernel" in out and "peak" in out and "dot FLOPs" in out
    assert not (tmp_path / "runs").exists()


def test_no_resume_moves_the_old_run_aside(script, tmp_path, capsys):
    """Otherwise an experiment that is started afresh would delete hours of work, or go on with it."""
    old = tmp_path / "runs" / "tiny"
    for expected in ("tiny.1", "tiny.2"):
        old.mkdir(parents=True)
        (old / "metrics.jsonl").write_text("old")
        assert start(script, "--no-resume --trainer.steps 1") == 0
        assert f"moved the old run in runs/tiny to runs/{expected}" in capsys.readouterr().out
        assert (tmp_path / "runs" / expected / "metrics.jsonl").read_text() == "old"
        assert steps(old) == [1]
        old.rename(tmp_path / "runs" / f"done {expected}")


def test_a_users_mistake_is_one_message_and_status_2(script, capsys):
    """Otherwise it would look like a bug of the program."""
    with pytest.raises(SystemExit) as ended:
        start(script, "--plan.mesh data=3")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("PlanError: 1 problem with this plan") and "found 8" in error


def test_a_group_that_matches_nothing_ends_with_the_parameters_there_are(script, tmp_path, capsys):
    """Otherwise a typo on the command line would leave everything as it was, in silence."""
    with pytest.raises(SystemExit) as ended:
        start(script, "--optimizer.groups *.biases:weight_decay=0 blocks.attention.*:frozen")
    assert ended.value.code == 2 and not (tmp_path / "runs").exists()
    error = capsys.readouterr().err
    assert "'*.biases' matches no parameter" in error and "'blocks.attention.*' matches" not in error
    assert "There are: embedding, " in error and "blocks.attention.q.kernel" in error


def test_an_impossible_warm_up_of_the_batch_ends_before_anything_compiles(script, tmp_path, capsys):
    """Otherwise a run would start, and fail when it comes to the stage."""
    with pytest.raises(SystemExit) as ended:
        start(script, "--data.rows 32 --trainer.batch-warmup.start-rows 12 --trainer.batch-warmup.updates 9")
    assert ended.value.code == 2 and not (tmp_path / "runs").exists()
    error = capsys.readouterr().err
    assert "steps of 12 rows do not divide into 8 replicas" in error
    assert "the nearest start_rows that do: 8 or 16" in error
