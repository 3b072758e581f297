"""`jaxpar compile SCRIPT --cluster 4x8xh100`: what an experiment's step takes and moves there, from shapes alone."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import tyro

from jaxpar.batch import token_shapes
from jaxpar.cli.generate import load_config
from jaxpar.config import RunConfig, Start, parse
from jaxpar.errors import ConfigError
from jaxpar.estimate.compile import StepReport
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.sizes import parse_size, size
from jaxpar.mesh import simulate
from jaxpar.program import Program, Shapes
from jaxpar.structure import inspect_model

DOES_NOT_FIT = 3


@dataclass(frozen=True)
class CompileConfig:
    """Compiles an experiment's real step for a cluster that need not be there, and reports memory, FLOPs,
    communication, and what the plan does not promise. No data is read and no array made.

    All other keys are the run's own: `--plan.mesh data=-1,tensor=8`, `--model.num-layers 48`, `--data.rows 512`.
    The status is 0; 3 if the step does not fit; 2 for a mistake in what was asked.

    Attributes:
      script: the experiment.
      cluster: nodes x devices of a node x kind, e.g. `4x8xh100`, `16x4xv5e`, `1x8xcpu`.
      fits: the memory of a device, e.g. `80GB`; status 3 if the step's peak is above it.
      json: print JSON in place of the table.
      rows: of one step; by default those of the experiment's data.
      length: positions of a row; by default that of the experiment's data.
    """

    script: tyro.conf.Positional[str]
    cluster: str
    fits: str | None = None
    json: bool = False
    rows: int | None = None
    length: int | None = None


def compile_command(arguments: Sequence[str]) -> int:
    """Prints the report; 0, or 3 if the step does not fit."""
    config, rest = tyro.cli(CompileConfig, args=list(arguments), prog="jaxpar compile", return_unknown_args=True)
    cluster = Cluster.parse(config.cluster)
    limit = None if config.fits is None else parse_size(config.fits)
    run_config, start = parse(load_config(config.script), rest, "jaxpar compile")
    if start != Start():
        raise ConfigError("compile starts no run: of a run's keys it takes those of model, data, optimizer and plan")
    simulate(cluster.size if cluster.kind == "cpu" else 1)
    found = program(run_config).compile(cluster, shapes(run_config.data, config))
    print(found.to_json() if config.json else found.full_table())
    return 0 if limit is None else _verdict(found, limit)


def program(config: RunConfig) -> Program:
    """What the experiment trains."""
    build = config.model.build
    optimizer = config.optimizer.build(inspect_model(build).params, config.trainer.steps)
    return Program(build, optimizer, config.plan)


def shapes(data: Any, config: CompileConfig) -> Shapes:
    """Of one step's batch as jaxpar's data make it: token rows with their documents. Raises ConfigError."""
    rows, length = config.rows or getattr(data, "rows", None), config.length or getattr(data, "row_length", None)
    if rows is None or length is None:
        raise ConfigError(f"{type(data).__name__} does not say the shape of a step: give --rows N --length N")
    documents = {name: jax.ShapeDtypeStruct((rows, length), "int32") for name in ("positions", "segments")}
    return token_shapes(rows, length) | documents


def _verdict(found: StepReport, limit: int) -> int:
    fits = found.peak_bytes <= limit
    verb = "fits" if fits else "does not fit"
    print(f"{verb}: the peak is {size(found.peak_bytes)} of {size(limit)}", file=sys.stderr)
    return 0 if fits else DOES_NOT_FIT
