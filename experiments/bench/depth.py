"""How long does the step of a deep model take to compile beside a shallow one's?

    python -m experiments.bench.depth

Layers are a loop in the program, so that it must not grow with depth: checked by its length and its dot FLOPs. Each
time is that of tracing, lowering and compiling anew, in one process, deep and shallow in turns.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

import jaxpar
from experiments.bench.overhead import Case
from jaxpar.estimate.compile import report

SHALLOW, DEEP = 6, 48
PLANS = (jaxpar.Plan(mesh="data=4,tensor=2"), jaxpar.Plan(mesh="data=8", zero=3, remat="dots"))
LENGTH_TOLERANCE = 0.02


@dataclass(frozen=True)
class Compiled:
    """Seconds of tracing and lowering, and of compiling; lines of the program; executed dot FLOPs per device."""

    lower: float
    compile: float
    lines: int
    flops: float

    @property
    def seconds(self) -> float:
        return self.lower + self.compile


def compile_step(case: Case, plan: jaxpar.Plan) -> Compiled:
    """Everything anew: jax keeps what it has traced and compiled."""
    jax.clear_caches()
    program = jaxpar.Program(case.config.build, optax.adamw(3e-4), plan)
    started = time.perf_counter()
    run = program.on()
    lowered = run.lower(jaxpar.token_shapes(case.rows, case.positions))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    flops = report(compiled, run.mesh).flops
    lines = len((compiled.as_text() or "").splitlines())
    return Compiled(lowered_at - started, done - lowered_at, lines, flops)


def head_flops(case: Case) -> float:
    """Of logits, their gradient to the activations and to the table, per device."""
    return 3 * 2 * case.rows * case.positions * case.vocab * case.embed / jax.device_count()


def check(shallow: Compiled, deep: Compiled, depths: tuple[int, int], head: float) -> None:
    """Raises `AssertionError` unless the deep program is as long, and its layers do so many times the work."""
    assert abs(deep.lines / shallow.lines - 1) <= LENGTH_TOLERANCE, f"lines: {shallow.lines}, deep {deep.lines}"
    ratio, expected = (deep.flops - head) / (shallow.flops - head), depths[1] / depths[0]
    assert abs(ratio / expected - 1) <= 1e-6, f"layers' FLOPs: {ratio:.4f} times as many, should be {expected:.4f}"


def measure(case: Case, plan: jaxpar.Plan, repeats: int, depths: tuple[int, int] = (SHALLOW, DEEP)) -> np.ndarray:
    """-> seconds `[repeats, (shallow, deep)]`. Raises `AssertionError`, see `check`."""
    times = []
    for repeat in range(repeats):
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        found = {i: compile_step(replace(case, layers=depths[i]), plan) for i in order}
        check(found[0], found[1], depths, head_flops(case))
        times.append((found[0].seconds, found[1].seconds))
    return np.asarray(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each depth")
    options = parser.parse_args()
    jaxpar.simulate(8)
    names = [f"{depth} layers" for depth in (SHALLOW, DEEP)]
    print(f"{'plan':<46}{names[0]:>12}{names[1]:>12}{'ratio':>8}", flush=True)
    for plan in PLANS:
        times = measure(Case(plan.mesh), plan, options.repeats)
        shallow, deep = (f"{seconds:.2f} s" for seconds in np.median(times, axis=0))
        ratio = float(np.median(times[:, 1] / times[:, 0]))
        print(f"{plan!s:<46}{shallow:>12}{deep:>12}{ratio:>8.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
