"""`jaxpar generate SCRIPT --prompt TEXT`: what the model of a run writes after a prompt."""

import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import tyro
from flax import nnx

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.config import FILE, RunConfig, Start, changes, default_directory, parse
from jaxpar.data.tokenizer_file import load_tokenizer
from jaxpar.errors import ConfigError
from jaxpar.plan import Plan
from jaxpar.program import Program
from jaxpar.structure import inspect_model
from jaxpar.training.average import to_averaged
from jaxpar.training.sample import generate


@dataclass(frozen=True)
class GenerateConfig:
    """Continues a prompt with the last checkpoint of a run, on one device.

    All other keys are the run's own, as it was trained with: `--model.num-layers 4`, `--directory runs/other`.

    Attributes:
      script: the experiment that was trained.
      prompt: the text to go on from.
      tokens: how many to write.
      temperature: 0 takes the likeliest token each time.
      seed: of what is drawn.
      window: the most tokens that the model sees; by default the length of the rows it was trained on.
      tokenizer: `bytes`, or the path of a tokenizer.json.
    """

    script: tyro.conf.Positional[str]
    prompt: str
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    window: int | None = None
    tokenizer: str = "bytes"

    def __post_init__(self) -> None:
        rules = {
            "prompt": (self.prompt != "", "a text that is not empty"),
            "tokens": (self.tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "window": (self.window is None or self.window >= 1, "1 or more"),
        }
        if wrong := [f"{name} needs {need}" for name, (good, need) in rules.items() if not good]:
            raise ConfigError("generate: " + "; ".join(wrong))


def generate_command(arguments: Sequence[str]) -> int:
    """Prints the prompt and what follows."""
    config, rest = tyro.cli(GenerateConfig, args=list(arguments), prog="jaxpar generate", return_unknown_args=True)
    script = load_config(config.script)
    run_config, start = parse(script, rest, "jaxpar generate")
    if replace(start, directory=None) != Start():
        raise ConfigError("generate trains nothing: of the keys that start a run it takes --directory alone")
    directory = start.directory or default_directory(run_config, script)
    window = config.window or getattr(run_config.data, "row_length", None)
    if window is None:
        raise ConfigError("the run's data has no row_length; say how many tokens the model may see: --window N")
    tokenizer = load_tokenizer(config.tokenizer)
    prompt = tokenizer.encode(config.prompt)
    model = load_model(run_config, directory)
    written = generate(model, prompt, config.tokens, window=window, temperature=config.temperature, seed=config.seed)
    print(config.prompt + tokenizer.decode(written))
    return 0


def load_config(script: str) -> RunConfig:
    """The one `RunConfig` among the names that a script defines, without running it as the main program."""
    if not os.path.isfile(script):
        raise ConfigError(f"there is no script {script!r} here ({os.getcwd()}); the first argument is a file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    names = runpy.run_path(script, run_name=Path(script).stem)
    found = {name: value for name, value in names.items() if isinstance(value, RunConfig)}
    if len(found) != 1:
        raise ConfigError(f"{script} needs one RunConfig among its names, found {', '.join(found) or 'none'}")
    return next(iter(found.values()))


def load_model(config: RunConfig, directory: Path) -> nnx.Module:
    """The model of the run in `directory` at its last checkpoint, with averaged parameters where the run keeps them.

    Raises `ConfigError` when the run has another model, `CheckpointError` when there is nothing that fits.
    """
    _check_model(config, directory)
    optimizer = config.optimizer.build(inspect_model(config.model.build).params, config.trainer.steps)
    run = Program(config.model.build, optimizer, Plan("data=1")).on(jax.devices()[:1])
    state = Checkpoints(directory / "checkpoints").restore(run).state
    return run.model(to_averaged(run)(state))


def _check_model(config: RunConfig, directory: Path) -> None:
    path = directory / FILE
    if not path.exists():
        raise ConfigError(f"{directory} holds no run: train first, or name the run's folder with --directory")
    trained = json.loads(path.read_text())
    if wrong := [c for c in changes(trained, config.to_dict()) if c.key.startswith("model.")]:
        lines = "\n".join(f"  - {change}" for change in wrong)
        raise ConfigError(f"the run in {directory} has another model:\n{lines}\ngive the keys that it was trained with")
