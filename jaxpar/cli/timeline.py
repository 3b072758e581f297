"""`jaxpar timeline`: a pipeline schedule as text, picture or trace, with what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.errors import ConfigError
from jaxpar.pipeline.build import build
from jaxpar.pipeline.schedule import Costs, Schedule
from jaxpar.pipeline.timeline import save_timeline

_SUFFIXES = (".svg", ".png", ".json")


@dataclass(frozen=True)
class TimelineConfig:
    """Prints a pipeline schedule, its bubble and the activations it holds; draws it with -o. Needs no device.

    Attributes:
      schedule: gpipe, 1f1b, interleaved, zero_bubble or zero_bubble_v.
      stages: devices along the pipeline.
      microbatches: of one step.
      virtual_stages: chunks of layers on each stage, of interleaved.
      lanes: stacks of layers that follow each other, each spread over all stages.
      fill: a zero-bubble schedule plays weight tasks in slots left idle.
      costs: time of one microbatch on one whole stage, in any unit.
      output: .svg or .png for a picture, .json for a trace that ui.perfetto.dev opens.
    """

    schedule: str = "1f1b"
    stages: int = 4
    microbatches: int = 8
    virtual_stages: int = 1
    lanes: int = 1
    fill: bool = False
    costs: Costs = field(default_factory=Costs)
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None


def timeline_command(arguments: Sequence[str]) -> int:
    """Prints the table or writes the picture, and says what the schedule costs; 0."""
    config = tyro.cli(TimelineConfig, args=list(arguments), prog="jaxpar timeline")
    for name in ("forward", "backward", "weight"):
        if not 0 < (cost := getattr(config.costs, name)) < float("inf"):
            raise ConfigError(f"costs.{name} must be a finite time above 0, found {cost}")
    if config.output and config.output.suffix not in _SUFFIXES:
        raise ConfigError(f"output must end in {', '.join(_SUFFIXES)}, found {config.output}")
    if config.output and not config.output.parent.is_dir():
        raise ConfigError(f"output {config.output}: there is no folder {config.output.parent}; make it first")
    schedule = build(
        config.schedule,
        config.stages,
        config.microbatches,
        config.virtual_stages,
        lanes=config.lanes,
        fill=config.fill,
    )
    if config.output:
        save_timeline(schedule, config.output, config.costs)
    else:
        print(schedule.draw() + "\n")
    print(summary(schedule, config.costs))
    if config.output:
        print(f"written to {config.output}")
    return 0


def summary(schedule: Schedule, costs: Costs) -> str:
    """The time, the bubble and what each stage holds, a line each."""
    unit = "microbatches" if schedule.chunks == 1 else f"chunks of 1/{schedule.chunks} of a stage"
    lines = [
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, {len(schedule.ticks)} ticks",
        f"bubble     {schedule.bubble(costs):.2%} of the work (time {schedule.time(costs):g})",
        f"peak live  {_counts(schedule.peak_live())} by stage, in {unit}; all stages allocate the largest",
    ]
    if schedule.split:
        lines.append(f"pending W  {_counts(schedule.peak_pending())} by stage, B played and W not")
    return "\n".join(lines)


def _counts(counts: Sequence[int]) -> str:
    """All of them, or those of the first and the last stages, and the largest."""
    shown = [*map(str, counts)] if len(counts) <= 12 else [*map(str, counts[:5]), "...", *map(str, counts[-5:])]
    return " ".join(shown) + f" (at most {max(counts)})"
