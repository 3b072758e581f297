"""`--plan FILE` and `--plan auto` of a script: a plan of `jaxpar plan -o FILE`, or the best for the devices."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxpar.batch import token_shapes
from jaxpar.config import RunConfig
from jaxpar.errors import ConfigError
from jaxpar.plan import Plan
from jaxpar.planner.here import auto
from jaxpar.program import Program, Shapes
from jaxpar.structure import inspect_model

_KEY, AUTO = "--plan", "auto"


def take_plan(script: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, list[str], bool]:
    """The script with the plan of `--plan FILE`, if there is one, the other arguments, and whether `--plan auto` asks
    for a search. Keys such as `--plan.zero` stay, and override the file. Raises `ConfigError`."""
    rest, named = list(arguments), None
    for i, argument in enumerate(rest):
        if argument == _KEY and i + 1 < len(rest):
            named, rest = rest[i + 1], rest[:i] + rest[i + 2 :]
            break
        if argument.startswith(f"{_KEY}="):
            named, rest = argument.partition("=")[2], rest[:i] + rest[i + 1 :]
            break
    if named is None or named == AUTO:
        return script, rest, named == AUTO
    return replace(script, plan=read_plan(Path(named))), rest, False


def read_plan(path: Path) -> Plan:
    """A plan as `write_plan` or `Plan.to_dict` has it. Raises `ConfigError`, or `PlanError` for an impossible plan."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plan file {path}: {error}; write one with jaxpar plan -o {path}, or say --plan auto"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"plan file {path}: needs a JSON object, found {type(values).__name__}")
    return Plan.from_dict(values.get("plan", values))


def program_of(config: RunConfig) -> Program:
    """What the experiment trains."""
    build = config.model.build
    return Program(build, config.optimizer.build(inspect_model(build).params, config.trainer.steps), config.plan)


def shapes_of(data: Any, rows: int | None = None, length: int | None = None) -> Shapes:
    """Of one step's batch as jaxpar's data make it: token rows with their documents. Raises `ConfigError`."""
    rows, length = rows or getattr(data, "rows", None), length or getattr(data, "row_length", None)
    if rows is None or length is None:
        raise ConfigError(f"{type(data).__name__} does not say the shape of a step: give --rows N --length N")
    documents = {name: jax.ShapeDtypeStruct((rows, length), "int32") for name in ("positions", "segments")}
    return token_shapes(rows, length) | documents


def planned(config: RunConfig) -> RunConfig:
    """With the best plan for the devices at hand; precision and what else changes numbers stay. Raises `PlanError`."""
    program = program_of(config)
    return replace(config, plan=auto(program.build, program.optimizer, shapes_of(config.data), base=config.plan))
