"""What does a mixture of experts cost beside a dense model of the same active FLOPs, on one device?

    python -m experiments.bench.moe

The dense model's MLP is as wide as all experts of a token together. Compiled dot FLOPs over the active ones say what
tiles, which are not quite full, add; steps of both run in turns, for wall and CPU time; `temp` says that memory grows
with tokens and not with tokens x experts.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from experiments.bench.overhead import Timing, timed
from jaxpar.estimate.compile import StepReport, report
from models.llama import LlamaConfig
from models.moe import MoEConfig

FLOPS_BOUND, TIME_BOUND = 1.2, 1.3
# With more experts than these on a CPU, tiles are small and their gradients add up in memory: time is not bounded.
FEW = 8
ROWS, POSITIONS, VOCAB, LAYERS, EMBED, CHOSEN = 32, 256, 512, 2, 256, 2


def sizes(mlp_dim: int) -> dict[str, Any]:
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": EMBED // 8}
    return {"vocab_size": VOCAB, "num_layers": LAYERS, "embed_dim": EMBED, "mlp_dim": mlp_dim, **heads}


def mixture(experts: int, expert_dim: int) -> MoEConfig:
    return MoEConfig(**sizes(1), num_experts=experts, experts_per_token=CHOSEN, moe_mlp_dim=expert_dim)


@dataclass
class Step:
    """A compiled step with its own state."""

    run: jaxpar.Run
    state: jaxpar.TrainState
    batch: dict[str, jax.Array]
    compiled: jax.stages.Compiled

    def __call__(self) -> None:
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    @property
    def report(self) -> StepReport:
        return report(self.compiled, self.run.mesh)


def compile_step(build: Callable[..., object], rows: int = ROWS) -> Step:
    run = jaxpar.Program(build, optax.sgd(1e-3), jaxpar.Plan("data=1")).on(jax.devices()[:1])  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (rows, POSITIONS + 1)).astype(np.int32)
    weights = np.ones((rows, POSITIONS), np.float32)
    batch = run.put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})
    state = run.init()
    return Step(run, state, batch, run.compiled_step.lower(state, batch).compile())


def expert_flops(step: Step, dense: Step, expert_dim: int) -> float:
    """Compiled dot FLOPs of experts over those of the pairs routed, forward and backward; the rest of the two models
    is the same, but for the router."""
    pairs = ROWS * POSITIONS * CHOSEN * LAYERS
    active = 3 * 3 * 2 * pairs * EMBED * expert_dim
    return (step.report.flops - (dense.report.flops - active)) / active


def compare(experts: int, expert_dim: int, seconds: float) -> bool:
    dense = compile_step(LlamaConfig(**sizes(CHOSEN * expert_dim)).build)
    sparse = compile_step(mixture(experts, expert_dim).build)
    share = expert_flops(sparse, dense, expert_dim)
    for step in (sparse, dense):
        step()
    pairs = []
    for turn in range(max(6, int(seconds / 0.8))):
        order = (sparse, dense) if turn % 2 == 0 else (dense, sparse)
        found = {id(step): timed(step) for step in order}
        pairs.append((found[id(sparse)], found[id(dense)]))
    times = np.asarray(pairs)
    print(f"{experts} experts of {expert_dim}, {CHOSEN} a token")
    print(f"  expert FLOPs compiled / active  {share:6.3f}  (at most {FLOPS_BOUND})")
    good = share <= FLOPS_BOUND
    for clock, name in enumerate(("wall", "CPU")):
        timing = Timing(times[:, 0, clock], times[:, 1, clock])
        low, high = timing.interval()
        print(
            f"  {name:<4} time / dense step's         {timing.ratio:6.3f}  {low:.3f} - {high:.3f} of {len(times)} pairs"
        )
        good &= name == "wall" or experts > FEW or timing.ratio <= TIME_BOUND
    return good


def memory() -> bool:
    """`temp` of 8 and of 32 experts on the same tokens, and of twice the tokens."""
    few, many = (compile_step(mixture(n, 128).build).report.temp_bytes for n in (8, 32))
    double = compile_step(mixture(8, 128).build, 2 * ROWS).report.temp_bytes
    weights = 3 * 4 * EMBED * 128 * LAYERS * (32 - 8)
    print(
        f"temp: 8 experts {few / 2**20:.1f} MiB, 32 experts {many / 2**20:.1f} MiB, of which their gradients "
        f"{weights / 2**20:.1f}; 8 experts on twice the tokens {double / 2**20:.1f} MiB"
    )
    return many - 2 * weights < 1.25 * few


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure for, each pair of models")
    options = parser.parse_args()
    good = [compare(8, 512, options.seconds), compare(64, 512, options.seconds), memory()]
    print("all within bounds" if all(good) else "NOT within bounds")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
