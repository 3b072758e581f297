"""`jaxpar plan SCRIPT --cluster 64x8xh100`: the fastest plans of an experiment that fit there, and why."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from jaxpar.cli.generate import load_config
from jaxpar.cli.plan_argument import program_of, shapes_of
from jaxpar.config import Start, parse
from jaxpar.errors import ConfigError
from jaxpar.estimate.hardware import Cluster
from jaxpar.mesh import simulate
from jaxpar.planner.calibration import Calibration, default_path
from jaxpar.planner.chart import save_bars, save_curve
from jaxpar.planner.explain import explain
from jaxpar.planner.measure import measure
from jaxpar.planner.question import Question
from jaxpar.planner.ranked import Ranked
from jaxpar.planner.scaling import parse_devices, scale
from jaxpar.planner.search import Progress, Search
from jaxpar.planner.sharpen import sharpen
from jaxpar.planner.space import Space
from jaxpar.planner.table import show, show_scaling
from jaxpar.planner.verify import verify

NO_PLAN = 3


@dataclass(frozen=True)
class PlanConfig:
    """Ranks every legal plan of an experiment on a cluster that need not be there, compiles the best, and explains.

    All other keys are the run's own: `--plan.precision bfloat16`, `--model.num-layers 48`. What the experiment's plan
    says of numbers (precision, dtypes, capacity of experts) is kept unless `--space` frees it; its mesh is not.
    The status is 0; 3 if there is no plan; 2 for a mistake in what was asked.

    Attributes:
      script: the experiment.
      cluster: nodes x devices of a node x kind, e.g. `64x8xh100`, parts joined by `+`; or a file, see docs/estimate.md.
      rows: of one step; by default those of the experiment's data.
      length: positions of a row; by default that of the experiment's data.
      top: how many plans to show.
      verify: how many of the best the compiler must agree with; 0 compiles nothing.
      memory: what a step may take of each device, in GB; by default 0.9 of what it has.
      output: a file for the best plan, which `jaxpar train SCRIPT --plan FILE` takes.
      json: print JSON in place of tables.
      chart: a .png or .svg of where time and memory of the best plans go; with `--devices` of the curve.
      devices: in place of the cluster's own number, `8..1024` by doubling, or `8,24,64`: the best plan on each, and
        with `--tokens` the cheapest of them.
      measure: time so many of the best on the devices at hand, which must be the cluster, and keep what that teaches of
        them in the calibration file for the next search.
      calibration: a file of what was measured before; by default that of this machine for the cluster's kind, if there
        is one.
      tokens: how many are trained on.
      deadline: hours that this may take.
      price: of a device and hour, in any currency; by default what a cluster file says.
      space: what is searched.
    """

    script: tyro.conf.Positional[str]
    cluster: str
    rows: int | None = None
    length: int | None = None
    top: int = 10
    verify: int = 1
    memory: float | None = None
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    json: bool = False
    chart: Path | None = None
    devices: str | None = None
    measure: int = 0
    calibration: Path | None = None
    tokens: float | None = None
    deadline: float | None = None
    price: float | None = None
    space: Space = field(default_factory=Space)


def plan_command(arguments: Sequence[str]) -> int:
    """Prints the ranked plans and why; 0, or 3 if there is none."""
    config, rest = tyro.cli(PlanConfig, args=list(arguments), prog="jaxpar plan", return_unknown_args=True)
    check(config)
    question = question_of(config, rest)
    if config.devices:
        return _scaling(config, question)
    with progress() as bar:
        ranked = sharpen(Search(question).run(bar), config.top, bar)
        ranked = verify(ranked, config.verify, bar) if config.verify and ranked.found else ranked
        if config.measure and ranked.found:
            ranked, learned = measure(ranked, config.measure, question.calibration, bar)
            learned.save(_calibration(config, question.cluster))
            print(f"learned, and kept in {_calibration(config, question.cluster)}: {learned.table}", file=sys.stderr)
        told = explain(ranked, bar)
    if config.verify and ranked.found and ranked.best.report is None:
        print(f"warning: {len(ranked.dropped)} plans did not hold when traced or compiled, and the best that is left "
              f"was not compiled: a larger --verify goes on, a smaller --memory is safer", file=sys.stderr)  # fmt: skip
    if config.json:
        print(json.dumps(ranked.to_dict(config.top) | {"explanation": told.to_dict()}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 200)
        show(ranked, config.top, console)
        console.print("\n" + told.text(), highlight=False)
    if config.chart and ranked.found:
        save_bars(told.shown, config.chart)
    return _keep(config, ranked)


def _scaling(config: PlanConfig, question: Question) -> int:
    assert config.devices is not None
    with progress() as bar:
        counts = parse_devices(config.devices)
        scaling = scale(question, counts, config.tokens, config.deadline, config.price, bar)
    if config.json:
        print(json.dumps(scaling.to_dict(), indent=2))
    else:
        show_scaling(scaling, Console(width=None if sys.stdout.isatty() else 200))
    if config.chart:
        save_curve(scaling, config.chart)
    return 0 if any(point.best for point in scaling.points) else NO_PLAN


def check(config: PlanConfig) -> None:
    """Raises `ConfigError`."""
    for name, value, least in (
        ("top", config.top, 1),
        ("verify", config.verify, 0),
        ("measure", config.measure, 0),
        ("memory", config.memory, 0),
        ("tokens", config.tokens, 1),
        ("deadline", config.deadline, 0),
        ("price", config.price, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, found {value}")
    for path in (config.output, config.chart):
        if path and not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    if config.chart and config.chart.suffix not in (".png", ".svg"):
        raise ConfigError(f"chart must end in .png or .svg, found {config.chart}")


def question_of(config: PlanConfig, rest: Sequence[str]) -> Question:
    """What the command line asks. Simulates the devices if they are CPUs."""
    run, start = parse(load_config(config.script), rest, "jaxpar plan")
    if start != Start():
        raise ConfigError("plan starts no run: of a run's keys it takes those of model, data, optimizer and plan")
    cluster = Cluster.read(config.cluster)
    if cluster.chip == "cpu" and (config.verify or config.measure):
        simulate(cluster.size)
    elif not config.measure:
        jax.config.update("jax_platforms", "cpu")  # nothing runs: leave the devices to others
    program = program_of(run)
    return Question(
        program.build, program.optimizer, cluster, shapes_of(run.data, config.rows, config.length), run.plan,
        config.space, program.batch_axes, getattr(run.model, "experts_per_token", None),
        None if config.memory is None else int(config.memory * 1e9),
        calibration=Calibration.load(path) if (path := _calibration(config, cluster)).exists() else None,
    )  # fmt: skip


def _calibration(config: PlanConfig, cluster: Cluster) -> Path:
    return config.calibration or default_path(str(cluster.kind))


def _keep(config: PlanConfig, ranked: Ranked) -> int:
    if not ranked.found:
        return NO_PLAN
    if config.output:
        write_plan(ranked, config.output)
        print(f"written to {config.output}: jaxpar train {config.script} --plan {config.output}", file=sys.stderr)
    return 0


def write_plan(ranked: Ranked, path: Path) -> None:
    """The best plan, with what it is for and what was predicted."""
    best, q = ranked.best, ranked.question
    about = {"cluster": str(q.cluster), "rows": q.rows, "length": q.length, "jax": jax.__version__}
    path.write_text(json.dumps(about | best.to_dict(), indent=2) + "\n")


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on the terminal, if stderr is one."""
    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, TaskID] = {}

        def show_progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)

        found: Callable[[str, int, int], None] = show_progress
        yield found
