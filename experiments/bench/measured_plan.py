"""Is what `jaxpar plan --measure` chooses as fast as the best of all plans, when all of them are timed?

    python -m experiments.bench.measured_plan              # three small models on eight simulated devices

Times every legal plan of a small space in turns, a few dozen programs, and lets `planner.measure` choose as a user
would. The best is that of the even rounds; choice and best are compared in the odd ones, round by round, so that the
luck of one plan in some rounds does not count. Ends with status 1 if a choice is more than 10 % slower.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

import jaxpar
from experiments.bench.overhead import Timing
from jaxpar.estimate.hardware import Cluster
from jaxpar.plan import Plan
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.measure import measure
from jaxpar.planner.question import Question
from jaxpar.planner.search import Search
from jaxpar.planner.space import Space, meshes
from jaxpar.planner.stopwatch import Stopwatch
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig

DEVICES, ROWS, POSITIONS, BOUND = 8, 32, 64, 1.1
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "num_layers": 4,
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
}
COMMON: dict[str, Any] = {"within_node": (False,), "remat": ("none",), "pipeline": ("1f1b",), "attention": ("ring",)}
MODELS: dict[str, tuple[Any, Space]] = {
    "llama": (
        LlamaConfig(**SIZES, mlp_dim=128),
        Space(pipe=(1, 2), tensor=(1, 2, 4), seq=(1, 2), zero=(1,), microbatches=(1, 4), **COMMON),
    ),
    "gpt": (
        GPTConfig(256, 4, 64, 4, 256, POSITIONS),
        Space(pipe=(1, 2, 4), tensor=(1, 2, 4), seq=(1,), zero=(0, 3), microbatches=(4,), **COMMON),
    ),
    "moe": (
        MoEConfig(**SIZES, mlp_dim=128, num_experts=4, moe_mlp_dim=64),
        Space(pipe=(1, 2), tensor=(1, 2), seq=(1,), expert=(1, 2, 4), zero=(1,), microbatches=(1, 4), **COMMON),
    ),
}


@dataclass(frozen=True)
class Contest:
    """Seconds of every plan in every round, and the plan that measuring a few of them chose."""

    candidates: Sequence[Candidate]
    seconds: dict[Plan, np.ndarray]
    choice: Plan
    timed: int

    @property
    def best(self) -> Plan:
        """By the even rounds."""
        return min(self.seconds, key=lambda plan: float(np.median(self.seconds[plan][::2])))

    @property
    def against_best(self) -> Timing:
        """Of the odd rounds: the choice beside the best."""
        return Timing(self.seconds[self.choice][1::2], self.seconds[self.best][1::2])

    def text(self) -> str:
        lines = []
        for candidate in sorted(self.candidates, key=lambda c: float(np.median(self.seconds[c.plan]))):
            low, middle, high = np.percentile(self.seconds[candidate.plan], [25, 50, 75]) * 1e3
            mark = " ".join(n for n, plan in (("chosen", self.choice), ("best", self.best)) if plan == candidate.plan)
            predicted = candidate.time.total * 1e3
            lines.append(
                f"{middle:>7.0f} ms ({low:.0f} - {high:.0f}){predicted:>7.0f} predicted {candidate.plan} {mark}"
            )
        return "\n".join(lines)


def every(question: Question) -> list[Candidate]:
    """All legal plans, the slow ones too."""
    search = Search(question)
    trunks = [trunk for shape in meshes(question.space, question.sizes) for trunk in search.trunks(shape)]
    return [search._variant(trunk, variant) for trunk in trunks for variant in search._variants(trunk)]


def contest(question: Question, count: int, rounds: int) -> Contest:
    stopwatch, candidates = Stopwatch(question), every(question)
    for i, candidate in enumerate(candidates):
        stopwatch.seconds(candidate.plan)  # compiles
        print(f"  {i + 1}/{len(candidates)} {candidate.plan}", file=sys.stderr, flush=True)
    after, _ = measure(Search(question).run(), count, stopwatch=stopwatch)
    seconds = stopwatch.in_turns([c.plan for c in candidates], rounds)
    timed = sum(c.measured is not None for c in after)
    return Contest(candidates, {p: np.asarray(s) for p, s in seconds.items()}, after.best.plan, timed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--count", type=int, default=4, help="as in --measure")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    jaxpar.simulate(DEVICES)
    good = True
    for name in options.models:
        config, space = MODELS[name]
        cluster, shapes = Cluster.parse(f"1x{DEVICES}xcpu"), jaxpar.token_shapes(ROWS, POSITIONS)
        found = contest(
            Question(config.build, optax.adamw(1e-3), cluster, shapes, space=space), options.count, options.rounds
        )
        ratio, (low, high) = found.against_best.ratio, found.against_best.interval()
        print(f"{name}: {len(found.candidates)} plans, {found.timed} timed by --measure {options.count}")
        print(found.text())
        print(f"chosen / best: {ratio:.3f}, 95 % interval {low:.3f} - {high:.3f}, at most {BOUND}\n", flush=True)
        good &= ratio <= BOUND
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
