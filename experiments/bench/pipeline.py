"""What do pipeline schedules cost: bubbles by the table, in executed FLOPs and in time; memory and compile time.

    python -m experiments.bench.pipeline            (--quick: a tiny model, to see that everything runs)

A bubble is the time in which a device waits over the time in which it works. A stage of a lockstep schedule that waits
computes all the same, on data that is masked. So the bubble can be counted: executed dot FLOPs of the layers on one
device of the compiled pipeline, against those of the same step on one device without a pipeline, divided by the stages.
It can be timed too, although the simulated devices share a few cores: an idle device would cost these nothing, one that
computes what is masked costs them as much as work, so that CPU time shows the bubble, and wall time if all cores are
busy. Both also show what else a pipeline does: messages, masks, buffers. The model has a small vocabulary: its time is
that of the layers. One device runs the same microbatches; steps take turns, so that what slows the machine slows all.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table as Printed

import jaxpar
from experiments.bench.executed import Executed, Work, by_the_table, weight_flops
from experiments.bench.overhead import Timing, timed
from jaxpar.estimate.compile import StepReport
from jaxpar.pipeline import Costs
from jaxpar.pipeline.table import lower
from jaxpar.plan import Pipeline
from models.llama import LlamaConfig

STAGES, MICROBATCHES = 4, 8
SCHEDULES = {
    "gpipe": Pipeline("gpipe"),
    "1f1b": Pipeline("1f1b"),
    "interleaved, v=2": Pipeline("interleaved", virtual_stages=2),
    "zero_bubble": Pipeline("zero_bubble"),
    "zero_bubble, fill": Pipeline("zero_bubble", fill=True),
    "zero_bubble_v": Pipeline("zero_bubble_v"),
    "zero_bubble_v, fill": Pipeline("zero_bubble_v", fill=True),
}
CLUSTERS = {"CPU": f"1x{STAGES}xcpu", "H100": f"1x{STAGES}xh100"}
MANY = 4 * MICROBATCHES
MEMORY_TOLERANCE, COMPILE_LIMIT = 0.05, 1.3


def formula(pipeline: Pipeline, p: int, m: int) -> float:
    """The bubble that the literature gives a schedule whose F, B and W are equally long (docs/pipelines.md)."""
    unit = (p - 1) / (3 * m)
    if "zero_bubble" not in str(pipeline.schedule):
        return 3 * unit / pipeline.virtual_stages
    return unit if pipeline.fill else 2 * unit


@dataclass(frozen=True)
class Case:
    """The model and the microbatch. The vocabulary is a size that no other dim has, by which the head is known."""

    layers: int = 8
    embed: int = 256
    vocab: int = 208
    rows: int = 2
    positions: int = 128
    microbatches: int = MICROBATCHES

    @cached_property
    def config(self) -> LlamaConfig:
        mlp = self.embed * 8 // 3 // 16 * 16
        return LlamaConfig(self.vocab, self.layers, self.embed, 4, 4, head_dim=self.embed // 4, mlp_dim=mlp)

    def program(self, pipeline: Pipeline | None) -> jaxpar.Program:
        """None: on one device."""
        if pipeline is None:
            plan = jaxpar.Plan("data=1", microbatches=self.microbatches)
        else:
            plan = jaxpar.Plan(
                f"pipe={STAGES}",
                microbatches=self.microbatches,
                pipeline=str(pipeline.schedule),
                virtual_stages=pipeline.virtual_stages,
                fill=pipeline.fill,
            )
        return jaxpar.Program(self.config.build, optax.sgd(1e-3), plan)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return dict(jaxpar.token_shapes(self.rows * self.microbatches, self.positions))

    def batch(self) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(0).integers(0, self.vocab, (self.rows * self.microbatches, self.positions + 1))
        weights = np.ones((self.rows * self.microbatches, self.positions), np.float32)
        return {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "weights": weights,
        }


class Step:
    """A compiled step; its state and batch come with its first call."""

    def __init__(self, case: Case, pipeline: Pipeline | None):
        self.case, self.pipeline = case, pipeline
        self.run = case.program(pipeline).on(jax.devices()[: STAGES if pipeline else 1])
        self.compiled = self.run.lower(case.shapes).compile()
        self.state: jaxpar.TrainState | None = None

    def __call__(self) -> None:
        if self.state is None:
            self.state, self.batch = self.run.init(), self.run.put(self.case.batch())
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    @cached_property
    def work(self) -> Work:
        stages = STAGES if self.pipeline else 1
        found = Executed(self.compiled.as_text() or "", self.case.vocab // stages).work
        matrices = {path: p.info.dims for path, p in self.run.placements.items() if p.info.stack}
        matrices = {path: dims for path, dims in matrices.items() if len(dims) > 1}
        table = lower(self.run.plan.schedule(stages))
        layers = self.case.layers // stages // table.schedule.chunks
        return by_the_table(found, table, weight_flops(matrices, layers, self.case.rows * self.case.positions))


@dataclass(frozen=True)
class Bubbles:
    """`cpu`, `wall`: seconds of each round, of the schedule and of one device."""

    table: float
    formula: float
    flops: float
    head: float
    cpu: Timing
    wall: Timing


def bubbles(case: Case, seconds: float) -> dict[str, Bubbles]:
    one, steps = Step(case, None), {name: Step(case, pipeline) for name, pipeline in SCHEDULES.items()}
    clocks = take_turns({"one device": one, **steps}, seconds)
    found = {}
    for name, step in steps.items():
        wall, cpu = (Timing(jaxpar=clocks[name][:, i], plain=clocks["one device"][:, i]) for i in (0, 1))
        found[name] = Bubbles(
            table=step.run.plan.schedule(STAGES).bubble(Costs()),
            formula=formula(SCHEDULES[name], STAGES, case.microbatches),
            flops=step.work.layers / (one.work.layers / STAGES) - 1,
            head=step.work.head / one.work.head,
            cpu=cpu,
            wall=wall,
        )
    return found


def take_turns(steps: dict[str, Callable[[], None]], seconds: float) -> dict[str, np.ndarray]:
    """-> by name seconds `[round, (wall, CPU)]`."""
    for step in steps.values():
        step()
    clocks: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while len(clocks["one device"]) < 3 or time.perf_counter() < end:
        order = list(steps) if len(clocks["one device"]) % 2 == 0 else list(reversed(steps))
        for name in order:
            clocks[name].append(timed(steps[name]))
    return {name: np.asarray(times) for name, times in clocks.items()}


@dataclass(frozen=True)
class Size:
    """A schedule on one platform. `few`, `many`: with `MICROBATCHES` and with `MANY` microbatches of the same size."""

    name: str
    platform: str
    few: tuple[StepReport, list[float]]
    many: tuple[StepReport, list[float]]

    @property
    def growth(self) -> float:
        return self.many[0].temp_bytes / self.few[0].temp_bytes

    @property
    def seconds(self) -> float:
        """Ratio of the medians."""
        return statistics.median(self.many[1]) / statistics.median(self.few[1])


def sizes(case: Case, repeats: int) -> Iterator[Size]:
    """Tracing, lowering and compiling anew each time, with few and with many microbatches in turns."""
    for platform, cluster in CLUSTERS.items():
        for name in ("gpipe", "1f1b"):
            times: dict[int, list[float]] = {MICROBATCHES: [], MANY: []}
            reports = {}
            for _ in range(repeats):
                for m, seconds in times.items():
                    jax.clear_caches()
                    program, started = replace(case, microbatches=m), time.perf_counter()
                    reports[m] = program.program(SCHEDULES[name]).compile(cluster, program.shapes)
                    seconds.append(time.perf_counter() - started)
            yield Size(name, platform, *((reports[m], seconds) for m, seconds in times.items()))


def bubble_table(found: dict[str, Bubbles]) -> Printed:
    table = Printed(title=f"bubble = waiting / work, p={STAGES}, m={MICROBATCHES}")
    for column in ("schedule", "table", "formula", "FLOPs", "CPU time", "95 %", "wall time", "95 %", "head / whole"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, b in found.items():
        clocks = []
        for timing in (b.cpu, b.wall):
            low, high = timing.interval()
            clocks += [f"{timing.ratio - 1:.3f}", f"{low - 1:.3f} - {high - 1:.3f}"]
        table.add_row(name, f"{b.table:.3f}", f"{b.formula:.3f}", f"{b.flops:.3f}", *clocks, f"{b.head:.4f}")
    return table


def size_table(found: list[Size]) -> Printed:
    table = Printed(title=f"m={MICROBATCHES} and m={MANY} microbatches of the same size")
    for column in ("schedule", "compiled for", "temp", "temp, more", "ratio", "compile", "compile, more", "ratio"):
        table.add_column(column, justify="right")
    for s in found:
        temps = [f"{r.temp_bytes / 2**20:.1f} MiB" for r, _ in (s.few, s.many)]
        times = [f"{statistics.median(t):.1f} s" for _, t in (s.few, s.many)]
        table.add_row(s.name, s.platform, *temps, f"{s.growth:.3f}", *times, f"{s.seconds:.3f}")
    return table


def claims(found: dict[str, Bubbles], compiled: list[Size]) -> Iterator[tuple[str, bool]]:
    """What docs/pipelines.md promises, and whether it was seen."""
    base = found["1f1b"].flops
    for name, limit in (("zero_bubble", 0.75), ("zero_bubble_v", 0.75)):
        yield _least(f"{name}: bubble of 1f1b's", found[name].flops / base, limit)
        yield _least(f"{name}, fill: bubble of 1f1b's", found[f"{name}, fill"].flops / base, 0.45)
    share = found["interleaved, v=2"].flops / base
    yield f"interleaved, v=2: bubble of 1f1b's {share:.3f}, is 1/v", abs(share - 0.5) <= 0.05
    for name, b in found.items():
        yield f"{name}: head FLOPs of one stage {b.head:.4f} of the whole, is 1/p", abs(b.head * STAGES - 1) <= 0.01
    for s in compiled:
        where = f"{s.name} on {s.platform}, m={MICROBATCHES} to {MANY}"
        if s.name == "1f1b":
            yield _least(f"{where}: temp bytes", s.growth, 1 + MEMORY_TOLERANCE)
        else:
            yield f"{where}: temp bytes {s.growth:.3f} times, grow", s.growth > 1 + MEMORY_TOLERANCE
        yield _least(f"{where}: compile time", s.seconds, COMPILE_LIMIT)


def _least(what: str, value: float, limit: float) -> tuple[str, bool]:
    return f"{what} {value:.3f} times, at most {limit}", value <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rounds, one compilation of each")
    parser.add_argument("--seconds", type=float, default=90.0, help="to measure the steps for")
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each program")
    options = parser.parse_args()
    jaxpar.simulate(STAGES)
    case = Case(embed=64, positions=32) if options.quick else Case()
    # Not of a terminal rich would make 80 columns.
    console = Console(width=max(Console().width, 120))
    found = bubbles(case, 0.0 if options.quick else options.seconds)
    console.print(bubble_table(found))
    compiled = list(sizes(case, 1 if options.quick else options.repeats))
    console.print(size_table(compiled))
    seen = list(claims(found, compiled))
    for claim, holds in seen:
        console.print(f"{'pass' if holds else 'FAIL'}  {claim}")
    return 0 if all(holds for _, holds in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
