"""What does jaxpar's step cost beside the same model and step written by hand in plain JAX?

    python -m experiments.bench.overhead

Checks that both compute the same loss, gradients and dot FLOPs, then runs them in turns on one device and on eight
simulated ones. Both start from the same parameters, batch and optimizer; both report loss and gradient norm. jaxpar
also leaves out steps that are not finite, which the plain step does not.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from experiments.bench import plain_llama
from jaxpar.estimate.compile import StepReport, report
from jaxpar.plan import Remat
from models.llama import LlamaConfig

MESHES = {"data=1": 1, "data=4,tensor=2": 8}
PATHS = {
    "embedding": "embedding",
    "norm": "norm.scale",
    "unembedding": "unembedding",
    "attention_norm": "blocks.attention_norm.scale",
    **{name: f"blocks.attention.{name}.kernel" for name in ("q", "k", "v", "out")},
    "mlp_norm": "blocks.mlp_norm.scale",
    **{name: f"blocks.mlp.{name}.kernel" for name in ("gate", "up", "down")},
}
FLOPS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Case:
    """One model, batch and mesh. The default takes a good half second a step on two CPU cores."""

    mesh: str
    remat: Remat = "none"
    layers: int = 6
    embed: int = 256
    vocab: int = 2048
    rows: int = 8
    positions: int = 256

    @cached_property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            num_layers=self.layers,
            embed_dim=self.embed,
            num_heads=8,
            num_kv_heads=4,
            head_dim=self.embed // 8,
            mlp_dim=self.embed * 8 // 3 // 16 * 16,
        )

    def batch(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.vocab, (self.rows, self.positions + 1)).astype(np.int32)
        weights = (rng.random((self.rows, self.positions)) < 0.9).astype(np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


class Contest:
    """jaxpar's step and the plain one, compiled for the same case, each with its own state."""

    def __init__(self, case: Case):
        plan = jaxpar.Plan(mesh=case.mesh, remat=case.remat)
        optimizer = optax.adamw(3e-4)
        devices = jax.devices()[: plan.shape.fixed_size()]
        self.case = case
        self.run = jaxpar.Program(case.config.build, optimizer, plan).on(devices)
        self.batch = self.run.put(case.batch())
        self.state = self.run.init()
        self.params = from_jaxpar(self.run.to_logical(self.state).params, self.run.mesh)
        self.opt_state = optimizer.init(self.params)
        self.step = self.run.compiled_step.lower(self.state, self.batch).compile()
        plain = plain_llama.make_step(optimizer, self.run.mesh, case.remat)
        self.plain = plain.lower(self.params, self.opt_state, self.batch).compile()

    @cached_property
    def reports(self) -> tuple[StepReport, StepReport]:
        return report(self.step, self.run.mesh), report(self.plain, self.run.mesh)

    def check(self) -> None:
        """Raises `AssertionError` unless both have the same loss and gradients, and dot FLOPs within 1 %."""
        grads, metrics = self.run.gradients(self.state, self.batch)
        found = jax.device_get(self.run.logical_params(grads))
        gradients = partial(plain_llama.gradients, mesh=self.run.mesh, remat=self.case.remat)
        loss, plain_grads = jax.jit(gradients)(self.params, self.batch)
        expected = {PATHS[name]: np.asarray(g) for name, g in plain_grads.items()}
        different = jaxpar.testing.compare(float(metrics["loss"]), found, float(loss), expected)
        assert not different, "\n".join(map(str, different))
        ours, theirs = (r.flops for r in self.reports)
        assert abs(ours / theirs - 1) <= FLOPS_TOLERANCE, f"dot FLOPs: jaxpar {ours:.4g}, plain {theirs:.4g}"

    def jaxpar_step(self) -> None:
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    def plain_step(self) -> None:
        self.params, self.opt_state, *metrics = self.plain(self.params, self.opt_state, self.batch)
        jax.block_until_ready((self.params, self.opt_state, metrics))


def from_jaxpar(params: Mapping[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """jaxpar's logical parameters under the plain model's names and shardings, in buffers of their own."""
    shardings = plain_llama.shardings(mesh)
    return {name: jax.device_put(np.asarray(params[path]), shardings[name]) for name, path in PATHS.items()}


@dataclass(frozen=True)
class Timing:
    """Seconds of each step, pair by pair; the two steps of a pair ran one after the other."""

    jaxpar: np.ndarray
    plain: np.ndarray

    @property
    def ratio(self) -> float:
        return float(np.median(self.jaxpar / self.plain))

    def interval(self, samples: int = 2000) -> tuple[float, float]:
        """A bootstrap 95 % confidence interval of `ratio`: pairs are drawn again, so that what slowed the whole
        machine for a while slowed both of a pair."""
        ratios = self.jaxpar / self.plain
        draws = np.random.default_rng(0).integers(0, len(ratios), (samples, len(ratios)))
        low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
        return float(low), float(high)


def measure(contest: Contest, seconds: float) -> tuple[Timing, Timing]:
    """Runs pairs for about `seconds` -> wall time, and CPU time, which a busy machine disturbs less."""
    steps = {"jaxpar": contest.jaxpar_step, "plain": contest.plain_step}
    for step in steps.values():
        step()
    pairs: list[dict[str, tuple[float, float]]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 5 or time.perf_counter() < end:
        order = list(steps) if len(pairs) % 2 == 0 else list(reversed(steps))
        pairs.append({name: timed(steps[name]) for name in order})
    wall, cpu = ({name: np.asarray([pair[name][clock] for pair in pairs]) for name in steps} for clock in (0, 1))
    return Timing(**wall), Timing(**cpu)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


HEADER = f"{'mesh':<17}{'':<6}{'jaxpar':>11}{'plain':>11}{'ratio':>8}  95 % interval"


def compare(case: Case, seconds: float) -> None:
    """Checks and measures one case in this process, and prints its rows of the table."""
    jaxpar.simulate(MESHES[case.mesh])
    contest = Contest(case)
    contest.check()
    for clock, timing in zip(("wall", "CPU"), measure(contest, seconds), strict=True):
        low, high = timing.interval()
        ours, plain = np.median(timing.jaxpar) * 1e3, np.median(timing.plain) * 1e3
        interval = f"{low:.3f} - {high:.3f} of {len(timing.plain)} pairs"
        print(f"{case.mesh:<17}{clock:<6}{ours:>8.0f} ms{plain:>8.0f} ms{timing.ratio:>8.3f}  {interval}")
    ours, plain = (r.temp_bytes / 2**20 for r in contest.reports)
    print(f"{case.mesh:<17}{'temp':<6}{ours:>7.1f} MiB{plain:>7.1f} MiB{ours / plain:>8.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", choices=MESHES, help="only this mesh, in this process (default: each in its own)")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--seconds", type=float, default=45.0, help="to measure for, each mesh")
    options = parser.parse_args()
    if options.mesh:
        compare(Case(options.mesh, remat=options.remat), options.seconds)
        return 0
    print(HEADER, flush=True)
    # The number of devices is fixed when jax starts, so each mesh has a process.
    command = [sys.executable, "-m", "experiments.bench.overhead", *sys.argv[1:], "--mesh"]
    return max(subprocess.run([*command, mesh], env=os.environ).returncode for mesh in MESHES)


if __name__ == "__main__":
    sys.exit(main())
