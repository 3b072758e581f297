"""What a run is, as one value: read from a script and a command line, kept as JSON, compared when the run goes on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpar.errors import ConfigError
from jaxpar.plan import Plan
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.profile import ProfiledSteps
from jaxpar.training.tracking import Service
from jaxpar.training.trainer import TrainerConfig

FILE = "config.json"

# What may change while the data goes on from its position, in each part of a mixture too; the fingerprint of its
# rows guards the rest of the paths.
_DATA_MAY_CHANGE = ("rows", "eval_rows", "paths", "directory")


@dataclass(frozen=True)
class RunConfig[Model, Data]:
    """A run: what is trained, on what, how, and how it is spread.

    Attributes:
      name: of the run, and of its folder under `runs/`.
      model: a frozen dataclass with `build(rngs) -> nnx.Module`.
      data: a frozen dataclass like `TextData`.
      optimizer: AdamW and its schedule.
      plan: how the model is spread.
      trainer: how long, and how often it evaluates and saves.
    """

    name: Annotated[str, tyro.conf.Fixed]
    model: Model
    data: Data
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: Plan = field(default_factory=Plan)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return json.loads(json.dumps(asdict(self), default=str))


@dataclass(frozen=True)
class Start:
    """How a run is started; no part of what it is.

    Attributes:
      directory: of the run, by default `runs/` and a name that follows from the config.
      resume: go on from the last checkpoint in it; else that folder is moved aside.
      dry_run: show where every parameter lies, and memory and FLOPs of the compiled step; train nothing.
      simulate: so many simulated CPU devices in place of those of this machine.
      compile_cache: keep compiled programs in `.cache` beside the run's folder, for the next start.
      profile: trace these steps of the run, first and last, into its folder: `10:13`.
      track: log the run's numbers to this service as well.
      coordinator: host:port of process 0, for a run of several processes; `auto`: as jax finds it out itself. By
        default JAX_COORDINATOR_ADDRESS, or what Slurm or Open MPI say, or one process alone.
      processes: how many there are; by default JAX_NUM_PROCESSES, or what the launcher says.
      process_id: which of them this is, from 0; by default JAX_PROCESS_ID, or what the launcher says.
      heartbeat_timeout: seconds after which a process that is not heard of counts as dead, and the others end.
    """

    directory: Path | None = None
    resume: bool = True
    dry_run: bool = False
    simulate: int | None = None
    compile_cache: bool = True
    profile: str | None = None
    track: Service | None = None
    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    heartbeat_timeout: int = 100

    def __post_init__(self) -> None:
        if self.profile is not None:
            ProfiledSteps.parse(self.profile)
        if self.simulate is not None and self.simulate < 1:
            raise ConfigError(f"simulate={self.simulate}: give 1 or more simulated devices")


@dataclass(frozen=True)
class _CommandLine[Config]:
    config: Annotated[Config, tyro.conf.arg(name="")]
    start: Annotated[Start, tyro.conf.arg(name="")]


def parse[C: RunConfig](default: C, arguments: Sequence[str], program: str) -> tuple[C, Start]:
    """`default` with the overrides of a command line: `--plan.mesh data=4,tensor=2 --data.shuffle-bytes`.

    An unknown key or a wrong type ends the process with status 2 and a message that names it and the nearest key; a
    value that is impossible does the same, or raises `ConfigError`.
    """
    config_type: Any = RunConfig[type(default.model), type(default.data)]  # type: ignore[misc]
    parsed = tyro.cli(
        _CommandLine[config_type],
        args=list(arguments),
        default=_CommandLine(default, Start()),
        prog=program,
        description="",
        config=(tyro.conf.AvoidSubcommands,),
    )
    return parsed.config, parsed.start


def default_directory(config: RunConfig, script: RunConfig) -> Path:
    """`runs/<name>`, and another one for data that is not the script's: those runs cannot continue each other."""
    parts = [config.name, *(c.label for c in changes(script.to_dict(), config.to_dict()) if c.other_data)]
    return Path("runs") / "-".join(parts)


@dataclass(frozen=True)
class Change:
    """One key that differs between two configs."""

    key: str
    before: Any
    now: Any

    @property
    def label(self) -> str:
        """For a folder's name."""
        name = self.key.rpartition(".")[2]
        text = name if self.now is True else f"{name}={self.now}"
        return "".join(c if c.isalnum() or c in "_=." else "_" for c in text)[:40]

    @property
    def breaks(self) -> bool:
        """Whether a run cannot go on with it: other parameters, or other rows."""
        return self.key.startswith("model.") or self.other_data

    @property
    def other_data(self) -> bool:
        """Whether the rows are others, or come in another order."""
        return self.key.startswith("data.") and self.key.rpartition(".")[2] not in _DATA_MAY_CHANGE

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} then, {self.now!r} now"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every key whose value differs, in the order of `now`; a key that one of them lacks counts as None."""
    flat_before, flat_now = dict(_flat(before)), dict(_flat(now))
    keys = [*flat_now, *(key for key in flat_before if key not in flat_now)]
    found = [Change(key, flat_before.get(key), flat_now.get(key)) for key in keys]
    return [change for change in found if change.before != change.now]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_continues(config: RunConfig, directory: Path) -> list[Change]:
    """What changed since the run in `directory` was started, if it can go on so; nothing where no run is.

    Raises `ConfigError` that names every change with which it cannot.
    """
    path = directory / FILE
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): restore it, or start afresh with --no-resume") from error
    changed = changes(before, config.to_dict())
    if breaking := [change for change in changed if change.breaks]:
        lines = "\n".join(f"  - {change}" for change in breaking)
        raise ConfigError(
            f"the run in {directory} cannot go on with another model or other data:\n{lines}\n"
            f"undo the change, name another --directory, or move the old run aside with --no-resume"
        )
    return changed


def save_config(config: RunConfig, directory: Path) -> None:
    """Writes `config.json`."""
    partial = directory / f"{FILE}.partial"
    partial.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    partial.replace(directory / FILE)
