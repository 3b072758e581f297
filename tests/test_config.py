"""A run as a value: overrides, its JSON, its folder, and what may change when it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.config import RunConfig, Start, changes, check_continues, default_directory, parse, save_config
from jaxpar.data.text import TextData
from jaxpar.errors import ConfigError
from jaxpar.training.groups import ParameterGroup
from models.llama import LlamaConfig

CONFIG = RunConfig(
    name="tiny",
    model=LlamaConfig(257, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16),
    data=TextData(paths=("a", "b"), row_length=16, rows=8),
)


def test_a_command_line_overrides_every_part():
    """Otherwise a script would have to be edited to run on another mesh."""
    line = "--plan.mesh data=4,tensor=2 --plan.zero 3 --data.shuffle-bytes --trainer.steps 20 --model.embed-dim 32"
    config, start = parse(CONFIG, [*line.split(), "--simulate", "8", "--no-resume", "--dry-run"], "script.py")
    assert (config.plan.mesh, config.plan.zero) == ("data=4,tensor=2", 3)
    assert config.data == replace(CONFIG.data, shuffle_bytes=True)
    assert config.model == replace(CONFIG.model, embed_dim=32)
    assert config.trainer == replace(CONFIG.trainer, steps=20)
    assert start == Start(simulate=8, resume=False, dry_run=True)
    _, start = parse(CONFIG, ["--profile", "10:13", "--track", "trackio", "--no-compile-cache"], "script.py")
    assert start == Start(profile="10:13", track="trackio", compile_cache=False)
    line = "--plan.offload optimizer activations --plan.reduce-dtype bfloat16"
    config, _ = parse(CONFIG, line.split(), "script.py")
    assert (config.plan.offload, config.plan.reduce_dtype) == (("optimizer", "activations"), "bfloat16")
    assert parse(CONFIG, [], "script.py") == (CONFIG, Start())


def test_groups_of_parameters_are_given_as_words():
    """Otherwise what is frozen, or decays, could only be changed in a script."""
    groups = (
        ParameterGroup("*embedding", learning_rate=0.5, weight_decay=0.0),
        ParameterGroup("blocks.attention.*", frozen=True),
    )
    words = ["*embedding:weight_decay=0,learning-rate=0.5", "blocks.attention.*:frozen"]
    config, _ = parse(CONFIG, ["--optimizer.groups", *words, "--trainer.steps", "3"], "script.py")
    assert config.optimizer.groups == groups and config.trainer.steps == 3
    assert tuple(ParameterGroup.parse(str(group)) for group in groups) == groups
    # A script's own groups stay, until the command line gives others, or none.
    script = replace(CONFIG, optimizer=replace(CONFIG.optimizer, groups=groups))
    assert parse(script, [], "script.py")[0].optimizer.groups == groups
    assert parse(script, ["--optimizer.groups"], "script.py")[0].optimizer.groups == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--plan.zer 3", "--plan.zero"),
        ("--trainer.steps many", "--trainer.steps"),
        ("--plan.zero 7", "zero=7: needs 0, 1, 2 or 3"),
        ("--data.rows 0", "rows must be at least 1"),
        ("--track wandbb", "wandb"),
        ("--optimizer.groups a.*:lr=3", "lr=3 is nothing that it can have; write PATTERN:learning_rate=0.5"),
        ("--optimizer.groups a.*:frozen b.*", "'b.*' needs a pattern, a colon and what holds for it"),
        ("--optimizer.groups a.*:weight_decay=-1", "'a.*:weight_decay=-1.0': learning_rate and weight_decay must be 0"),
    ],
)
def test_a_wrong_key_or_value_ends_with_a_message_that_names_it(line, message, capsys):
    """Otherwise a typo would train the default, or show a traceback."""
    with pytest.raises(SystemExit) as ended:
        parse(CONFIG, line.split(), "script.py")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.replace("│", " ").split()) and "Traceback" not in error


def test_no_simulated_devices_are_refused():
    """Otherwise 0 would mean the real ones to some and an error deep inside jax to others."""
    with pytest.raises(ConfigError, match="simulate=0: give 1 or more"):
        parse(CONFIG, ["--simulate", "0"], "script.py")


def test_steps_to_profile_are_checked_before_the_run():
    """Otherwise a typo would show when the data is read and the model made."""
    with pytest.raises(ConfigError, match="needs FIRST:LAST"):
        parse(CONFIG, ["--profile", "13:10"], "script.py")


def test_other_data_has_another_folder_and_another_batch_size_has_not():
    """Otherwise a control run would resume the run that it is a control for."""
    changed = replace(CONFIG, data=replace(CONFIG.data, shuffle_bytes=True, seed=3, rows=16))
    assert default_directory(CONFIG, CONFIG) == Path("runs/tiny")
    assert default_directory(changed, CONFIG) == Path("runs/tiny-seed=3-shuffle_bytes")


def test_changes_name_each_key_with_both_values():
    """Otherwise one would compare two files of settings by eye."""
    found = changes(CONFIG.to_dict(), replace(CONFIG, data=replace(CONFIG.data, rows=4, paths=("a",))).to_dict())
    assert list(map(str, found)) == ["data.paths: ['a', 'b'] then, ['a'] now", "data.rows: 8 then, 4 now"]
    assert [str(c) for c in changes({"old": 1}, {"new": {"x": 2}})] == [
        "new.x: None then, 2 now",
        "old: 1 then, None now",
    ]


def test_a_run_goes_on_with_another_plan_and_not_with_another_model(tmp_path):
    """Otherwise a checkpoint of another shape would be met deep inside, or a harmless change be refused."""
    assert check_continues(CONFIG, tmp_path) == []
    save_config(CONFIG, tmp_path)
    assert check_continues(CONFIG, tmp_path) == []
    other = replace(CONFIG, plan=replace(CONFIG.plan, zero=1), data=replace(CONFIG.data, rows=4))
    assert [c.key for c in check_continues(other, tmp_path)] == ["data.rows", "plan.zero"]
    broken = replace(other, model=replace(CONFIG.model, embed_dim=32), data=replace(CONFIG.data, held_out=0.5))
    with pytest.raises(ConfigError) as error:
        check_continues(broken, tmp_path)
    message = str(error.value)
    assert "model.embed_dim: 16 then, 32 now" in message and "data.held_out: 0.1 then, 0.5 now" in message
    assert "plan.zero" not in message and "--no-resume" in message


def test_a_damaged_config_is_named(tmp_path):
    """Otherwise a cut-off file would end in a traceback."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        check_continues(CONFIG, tmp_path)
