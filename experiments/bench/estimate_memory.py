"""Is the memory estimator right: predicted peak bytes of a step beside what XLA allocates for it.

    python -m experiments.bench.estimate_memory             # goes on where it stopped; see --help

Compiles each program of `experiments/bench/memory_plans.py`, those for H100s without one (`pip install
'jaxpar[aot-gpu]'`), which takes an hour on two cores. What the compiler says is kept by case in `estimate_memory.jsonl`
beside the page, docs/estimate_memory.md, until the table is whole. Ends with status 1 if a goal is missed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import kendalltau

import jaxpar
from experiments.bench.memory_plans import Case, cases
from jaxpar.estimate.step_memory import StepMemory

MEDIAN_LIMIT, WORST_LIMIT, TAU_LIMIT = 0.05, 0.15, 0.95


@dataclass(frozen=True)
class Result:
    case: Case
    predicted: StepMemory
    compiled: int

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted.total / self.compiled - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/estimate_memory.md"))
    parser.add_argument("--only", default="", help="cases whose text has this in it; the page is not written then")
    parser.add_argument("--keep", action="store_true", help="keep what was measured after the page is written")
    args = parser.parse_args()
    jaxpar.simulate(8)
    record = args.output.with_suffix(".jsonl")
    done = read(record)
    chosen = [case for case in cases() if args.only in f"{case.group}: {case}"]
    results = []
    with record.open("a") as file:
        for case in chosen:
            if str(case) not in done:
                done[str(case)] = measure(case)
                print(json.dumps({"case": str(case), "peak_bytes": done[str(case)]}), file=file, flush=True)
            results.append(Result(case, predict(case), done[str(case)]))
            print(line(results[-1]), flush=True)
    print(summary(results))
    if not args.only:
        args.output.write_text(page(results))
        if not args.keep:
            record.unlink()  # what this compiler says must not stand in for what the next one does
    sys.exit(0 if passes(results) else 1)


def read(record: Path) -> dict[str, int]:
    lines = record.read_text().splitlines() if record.exists() else []
    return {row["case"]: row["peak_bytes"] for row in map(json.loads, lines)}


def measure(case: Case) -> int:
    return case.program.compile(case.cluster, jaxpar.token_shapes(case.rows, case.length)).peak_bytes


def predict(case: Case) -> StepMemory:
    return case.program.memory(case.cluster, jaxpar.token_shapes(case.rows, case.length))


def line(r: Result) -> str:
    parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in r.predicted.parts.items() if size >= 2**19)
    sizes = f"{r.predicted.total / 2**20:10.1f} {r.compiled / 2**20:10.1f} MiB {r.error:+7.1%}"
    return f"{sizes}  {r.case}  [{r.predicted.phase}: {parts}]"


def errors(results: Sequence[Result]) -> np.ndarray:
    return np.asarray([abs(r.error) for r in results])


def tau(results: Sequence[Result]) -> float:
    return float(kendalltau([r.predicted.total for r in results], [r.compiled for r in results]).statistic)


def passes(results: Sequence[Result]) -> bool:
    found = errors(results)
    return np.median(found) <= MEDIAN_LIMIT and found.max() <= WORST_LIMIT and tau(results) >= TAU_LIMIT


def summary(results: Sequence[Result]) -> str:
    found = errors(results)
    return (
        f"{len(results)} programs: median error {np.median(found):.1%} (goal {MEDIAN_LIMIT:.0%}), worst "
        f"{found.max():.1%} (goal {WORST_LIMIT:.0%}), Kendall's tau {tau(results):.3f} (goal {TAU_LIMIT})"
    )


def page(results: Sequence[Result]) -> str:
    lines = [INTRODUCTION, "", summary(results) + ".", ""]
    for group in dict.fromkeys(r.case.group for r in results):
        lines += [f"{group}: {summary([r for r in results if r.case.group == group])}.", ""]
    lines += ["| program | predicted, MiB | compiled, MiB | error | peak in |", "|---|---|---|---|---|"]
    for r in results:
        sizes = f"{r.predicted.total / 2**20:,.1f} | {r.compiled / 2**20:,.1f} | {r.error:+.1%}"
        lines.append(f"| {r.case} | {sizes} | {r.predicted.phase} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# A step's memory without compiling it

Written by `experiments/bench/estimate_memory.py`. `Program.memory(cluster, shapes)` says what a step takes on one
device, by what it is for; `MemoryModel` does so for many plans of one model, 1.5 ms each once what they share is
traced.

What is given to a step (parameters, optimizer state, batch) is exact to the byte: it follows from the placements. What
the step accumulates, and what its ring buffers hold, follow from the plan, the schedule's table and the arrays that one
layer saves. What a layer, the head or the embedding needs as it runs is found by tracing it once on abstract arrays and
adding up which values are alive, where values that XLA fuses into the kernel that reads them are none. The peak is that
of the phase that needs most.

What is taken to be true of XLA beside that, seen in its buffer assignments while this was made, so with the errors of
the simulated and published programs in view (those drawn at random were compiled after):

- Gathered weights are alive for this layer and the next one; on GPUs shards that are gathered along another dim than
  the first are turned once, whole stacks of them.
- On GPUs with `tensor`, products of the weights' gradients wait for the end of the layer, to lie over communication; a
  product may add to what is there and change its dtype as it writes. On CPU neither; there XLA stores what is costly
  (an exponential) and read twice, and makes float32 copies of the bfloat16 that a weight's gradient is a product of.
- With ZeRO 1 and 2 one new parameter at a time is gathered whole before it takes the old one's place.
- A step of one microbatch without a pipeline makes each thing when it is needed: accumulators with the backward.

Not in it: the order in which XLA for CPU runs what does not depend on each other, which keeps more alive than the
trace's; and what XLA's own rematerialisation saves when a program does not fit."""


if __name__ == "__main__":
    main()
