"""What does host offload cost a step?

    python -m experiments.bench.offload

Runs the same step with and without offload, in turns, on one device of this machine, and prints the ratio of their
times: a measurement. On CPU the host's memory is the device's, so that it shows what the copies cost XLA's program and
says nothing about a GPU. Then compiles a larger step for H100s that are not there, and sets the bytes that cross PCIe
beside the FLOPs: an estimate.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from experiments.bench.overhead import Case, Timing, timed
from jaxpar.estimate.devices import device
from jaxpar.plan import Offload
from models.llama import LlamaConfig

KINDS: Mapping[str, tuple[Offload, ...]] = {
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "both": ("optimizer", "activations"),
}

# NVIDIA's H100 data sheet: PCIe Gen5 128 GB/s, both ways together, so 64 GB/s each way. What a copy reaches is less.
PCIE_BYTES = 64e9
# What a well tuned step reaches of the peak; the estimate is in proportion to it.
MFU = 0.4

H100 = LlamaConfig(32768, 8, 4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336)
CLUSTER, ROWS, LENGTH = "1x8xh100", 16, 4096


class Step:
    """One plan's step, compiled, with its state."""

    def __init__(self, case: Case, offload: tuple[Offload, ...]):
        plan = jaxpar.Plan(case.mesh, offload=offload)
        self.run = jaxpar.Program(case.config.build, optax.adamw(3e-4), plan).on(jax.devices()[:1])
        self.batch, self.state = self.run.put(case.batch()), self.run.init()
        self.loss = 0.0

    def __call__(self) -> None:
        self.state, metrics = self.run.step(self.state, self.batch)
        self.loss = float(jax.block_until_ready((self.state, metrics))[1]["loss"])


def measure(case: Case, seconds: float) -> dict[str, tuple[Timing, Timing]]:
    """By kind of offload, its step (as `jaxpar`) and that without (as `plain`), one pair after the other, for about
    `seconds` in all: wall time, and CPU time, which a busy machine disturbs less."""
    kept, steps = Step(case, ()), {kind: Step(case, offload) for kind, offload in KINDS.items()}
    for step in (kept, *steps.values()):
        step()
    assert all(step.loss == kept.loss for step in steps.values()), "offload changes the loss"
    pairs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs["both"]) < 5:
        for kind, step in steps.items():
            swapped = len(pairs[kind]) % 2 == 1
            first, second = (kept, step) if swapped else (step, kept)
            times = timed(first), timed(second)
            pairs[kind].append(times[::-1] if swapped else times)
    clocks = {kind: np.moveaxis(np.asarray(times), 0, -1) for kind, times in pairs.items()}
    return {kind: (Timing(*times[:, 0]), Timing(*times[:, 1])) for kind, times in clocks.items()}


def print_measured(case: Case, seconds: float) -> None:
    print(f"measured on this machine's {jax.default_backend()}, {case}")
    print(f"{'offload':<14}{'':<6}{'with':>11}{'without':>11}{'ratio':>8}  95 % interval")
    for kind, timings in measure(case, seconds).items():
        for clock, timing in zip(("wall", "CPU"), timings, strict=True):
            low, high = timing.interval()
            away, kept = np.median(timing.jaxpar) * 1e3, np.median(timing.plain) * 1e3
            interval = f"{low:.3f} - {high:.3f} of {len(timing.plain)} pairs"
            print(f"{kind:<14}{clock:<6}{away:>8.0f} ms{kept:>8.0f} ms{timing.ratio:>8.3f}  {interval}", flush=True)


def print_estimated() -> None:
    """Bytes are those of the compiled program; PCIe moves both ways at once, so the larger way counts."""
    plan = jaxpar.Plan("data=8", zero=1, precision="bfloat16", remat="full")
    print(f"\nestimated, not measured: {plan} on {CLUSTER}, {ROWS} rows of {LENGTH} tokens, per device and step")
    print(f"at {PCIE_BYTES / 1e9:.0f} GB/s each way and {MFU:.0%} of the peak FLOP/s")
    print(f"{'offload':<14}{'peak':>11}{'in host':>11}{'copies':>11}{'work':>11}{'copies / work':>15}")
    shapes = jaxpar.token_shapes(ROWS, LENGTH)
    for kind, offload in {"none": (), **KINDS}.items():
        program = jaxpar.Program(H100.build, optax.adamw(3e-4), replace(plan, offload=offload))
        step = program.compile(CLUSTER, shapes)
        # What lies on the host goes there once a step and comes back once.
        copies, work = step.host_bytes / PCIE_BYTES, step.flops / (MFU * device("h100").bf16_flops)
        sizes = f"{step.peak_bytes / 2**30:>7.2f} GiB{step.host_bytes / 2**30:>7.2f} GiB"
        print(f"{kind:<14}{sizes}{copies * 1e3:>8.0f} ms{work * 1e3:>8.0f} ms{copies / work:>15.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure for")
    options = parser.parse_args()
    jaxpar.simulate(1)
    print_measured(Case("data=1", layers=4, embed=128, vocab=1024, positions=128), options.seconds)
    print_estimated()
    return 0


if __name__ == "__main__":
    sys.exit(main())
