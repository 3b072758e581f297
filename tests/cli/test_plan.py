"""`jaxpar plan`: from an experiment to a plan file that `--plan` of a script takes."""

import json
from dataclasses import replace

import pytest

from experiments.pretrain_lm import CONFIG as EXPERIMENT
from jaxpar.cli import main
from jaxpar.cli.plan_argument import read_plan, take_plan
from jaxpar.config import RunConfig
from jaxpar.errors import ConfigError, PlanError
from jaxpar.plan import Plan

SCRIPT = "experiments/pretrain_lm.py"
QUIET = ("--verify", "0", "--space.pipe", "1", "--space.seq", "1")


@pytest.fixture(autouse=True)
def no_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_best_plan_goes_from_a_table_to_a_file_to_a_script(tmp_path, capsys):
    """Otherwise a plan would have to be typed by hand."""
    path = tmp_path / "plan.json"
    assert main(["plan", SCRIPT, "--cluster", "1x8xcpu", "-o", str(path), *QUIET]) == 0
    out, err = capsys.readouterr()
    assert "legal plans" in out and "where the" in out and f"--plan {path}" in err
    plan = read_plan(path)
    assert plan.shape.fixed_size() == 8
    script, rest, search = take_plan(EXPERIMENT, ["--plan", str(path), "--trainer.steps", "3"])
    assert script.plan == plan and rest == ["--trainer.steps", "3"] and not search
    assert take_plan(EXPERIMENT, ["--plan=auto"])[1:] == ([], True)


def test_json_holds_candidates_and_why(capsys):
    """Otherwise a program could not read the result."""
    assert main(["plan", SCRIPT, "--cluster", "2x8xh100", "--rows", "64", "--json", *QUIET]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["candidates"][0]
    assert first["fits"] and Plan.from_dict(first["plan"]).precision == "float32"
    assert first["seconds"] == pytest.approx(sum(first["seconds_by_part"].values()))
    assert found["explanation"]["text"]


def test_a_best_plan_that_was_not_compiled_is_said_to_be_so(monkeypatch, capsys):
    """Otherwise what only arithmetic says would pass for what the compiler confirmed."""

    def contradicted(ranked, *_):
        return replace(ranked, found=ranked.found[1:], dropped=((ranked.best, "too large"),))

    monkeypatch.setattr("jaxpar.cli.plan.verify", contradicted)
    assert main(["plan", SCRIPT, "--cluster", "1x8xcpu", "--verify", "1", *QUIET[2:]]) == 0
    assert "1 plans did not hold when traced or compiled" in capsys.readouterr().err


def test_no_plan_has_a_status_of_its_own_and_a_reason(capsys):
    """Otherwise a script could not tell it from success."""
    assert main(["plan", SCRIPT, "--cluster", "1x2xcpu", "--memory", "0.001", *QUIET]) == 3
    assert "MB too much, most of it" in capsys.readouterr().out


def test_a_curve_of_clusters_names_the_cheapest(capsys, tmp_path):
    """Otherwise `--devices` would be a search a time, by hand."""
    arguments = ["--devices", "2..8", "--tokens", "1e9", "--price", "2", "--chart", str(tmp_path / "c.png")]
    assert main(["plan", SCRIPT, "--cluster", "1x8xh100", *arguments, *QUIET]) == 0
    assert "cheapest for 1e+09 tokens" in capsys.readouterr().out and (tmp_path / "c.png").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cluster", "8xh100"], "NODESxDEVICESxKIND"),
        (["--cluster", "1x8xh100", "--top", "0"], "top must be at least 1"),
        (["--cluster", "1x8xh100", "-o", "no/such/plan.json"], "there is no folder"),
        (["--cluster", "1x8xh100", "--space.pipe", "0"], "no positive sizes"),
        (["--cluster", "1x8xh100", "--no-resume"], "starts no run"),
    ],
)
def test_a_mistake_ends_with_one_message_and_status_2(arguments, message, capsys):
    """Otherwise a typo would end in a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", SCRIPT, *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_plan_file_that_is_none_says_how_to_make_one(tmp_path):
    """Otherwise a lost file would look like a bug."""
    with pytest.raises(ConfigError, match="jaxpar plan -o"):
        take_plan(EXPERIMENT, ["--plan", str(tmp_path / "none.json")])
    (tmp_path / "odd.json").write_text('{"plan": {"mish": "data=8"}}')
    with pytest.raises(PlanError, match="did you mean 'mesh'"):
        read_plan(tmp_path / "odd.json")
    assert isinstance(EXPERIMENT, RunConfig)
