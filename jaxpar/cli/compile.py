"""`jaxpar compile SCRIPT --cluster 4x8xh100`: what an experiment's step takes and moves there, from shapes alone."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from jaxpar.cli.generate import load_config
from jaxpar.cli.plan_argument import program_of, shapes_of
from jaxpar.config import Start, parse
from jaxpar.errors import ConfigError
from jaxpar.estimate.compile import StepReport
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.sizes import parse_size, size
from jaxpar.mesh import simulate

DOES_NOT_FIT = 3


@dataclass(frozen=True)
class CompileConfig:
    """Compiles an experiment's real step for a cluster that need not be there, and reports memory, FLOPs,
    communication, and what the plan does not promise. No data is read and no array made.

    All other keys are the run's own: `--plan.mesh data=-1,tensor=8`, `--model.num-layers 48`, `--data.rows 512`.
    The status is 0; 3 if the step does not fit; 2 for a mistake in what was asked.

    Attributes:
      script: the experiment.
      cluster: nodes x devices of a node x kind, e.g. `4x8xh100`, `16x4xv5e`, `1x8xcpu`; or a
        file with other kinds, see docs/estimate.md.
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
    cluster = Cluster.read(config.cluster)
    limit = None if config.fits is None else parse_size(config.fits)
    run_config, start = parse(load_config(config.script), rest, "jaxpar compile")
    if start != Start():
        raise ConfigError("compile starts no run: of a run's keys it takes those of model, data, optimizer and plan")
    simulate(cluster.size if cluster.chip == "cpu" else 1)
    shapes = shapes_of(run_config.data, config.rows, config.length)
    found = program_of(run_config).compile(cluster, shapes)
    print(found.to_json() if config.json else found.full_table())
    return 0 if limit is None else _verdict(found, limit)


def _verdict(found: StepReport, limit: int) -> int:
    fits = found.peak_bytes <= limit
    verb = "fits" if fits else "does not fit"
    print(f"{verb}: the peak is {size(found.peak_bytes)} of {size(limit)}", file=sys.stderr)
    return 0 if fits else DOES_NOT_FIT
