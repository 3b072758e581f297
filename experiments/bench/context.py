"""What does it cost to split positions over devices, and what does zigzag order save?

    python -m experiments.bench.context

First the whole step of each way to split, on 4 and 8 simulated devices, in turns with one device that does the same
total work: the cores are the same, so that a ratio of 1 is no cost. Then attention alone, in zigzag order and in the
order of the row: counts the pairs of blocks that each device visits, of which the slowest device decides on a machine
where each device is a processor. Simulated devices share their cores, and show that only as far as these are as many.
"""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpar
from experiments.bench.overhead import Timing, timed
from jaxpar.parallel import attention_blocks
from jaxpar.parallel.attention import DEFAULT_BLOCK
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.parallel.sequence_attention import attend_over_sequence
from jaxpar.plan import Attention
from models.llama import LlamaConfig

MODEL = LlamaConfig(512, 2, 128, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=256)
WAYS: tuple[tuple[Attention, int], ...] = (("ring", 1), ("ulysses", 1), ("allgather", 1), ("ring", 2))
PLANS = tuple(jaxpar.Plan(f"seq={seq}", attention=way, ulysses=ulysses) for seq in (4, 8) for way, ulysses in WAYS)
RINGS = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    """A model and one row, in which attention is about half of the work."""

    model: LlamaConfig = MODEL
    positions: int = 2048

    def batch(self) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(0).integers(0, self.model.vocab_size, (1, self.positions + 1)).astype(np.int32)
        weights = np.ones((1, self.positions), np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

    def heads(self, count: int, length: int) -> Array:
        return jnp.asarray(np.random.default_rng(count).normal(size=(1, length, count, self.model.head_dim)), "float32")


class Step:
    """One plan's step, compiled, with its state."""

    def __init__(self, case: Case, plan: jaxpar.Plan):
        devices = jax.devices()[: plan.shape.fixed_size()]
        self.run = jaxpar.Program(case.model.build, optax.adamw(3e-4), plan).on(devices)
        self.batch, self.state = self.run.put(case.batch()), self.run.init()
        self.loss = 0.0

    def __call__(self) -> None:
        self.state, metrics = self.run.step(self.state, self.batch)
        self.loss = float(jax.block_until_ready((self.state, metrics))[1]["loss"])


def in_pairs[K](steps: Mapping[K, tuple[Callable[[], Any], Callable[[], Any]]], seconds: float) -> dict[K, Timing]:
    """Runs the two of each pair one after the other, all pairs in turns, for about `seconds` -> wall time by key, of
    the first (as `jaxpar`) and the second (as `plain`)."""
    times: dict[K, list[tuple[float, float]]] = {key: [] for key in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for key, (first, second) in steps.items():
            if len(times[key]) % 2 == 0:
                pair = timed(first)[0], timed(second)[0]
            else:
                pair = (timed(second)[0], timed(first)[0])[::-1]
            times[key].append(pair)
    return {key: Timing(*np.asarray(pairs).T) for key, pairs in times.items()}


def measure_modes(case: Case, plans: tuple[jaxpar.Plan, ...], seconds: float) -> dict[jaxpar.Plan, Timing]:
    """Each plan's step beside that of one device. Raises `AssertionError` unless all have the same loss."""
    one, steps = Step(case, jaxpar.Plan("data=1")), {plan: Step(case, plan) for plan in plans}
    for step in (one, *steps.values()):
        step()
    losses = [step.loss for step in (one, *steps.values())]
    assert np.allclose(losses, losses[0], rtol=1e-5), losses
    return in_pairs({plan: (step, one) for plan, step in steps.items()}, seconds)


@dataclass(frozen=True)
class NaturalRing(SequenceLayout):
    """A ring in which each device holds positions as they follow each other in the row."""

    parts = 1  # type: ignore[assignment]

    def order(self, positions: int) -> np.ndarray:
        return np.arange(positions, dtype=np.int32).reshape(self.devices, -1)

    def part_starts(self, group_positions: int) -> np.ndarray:
        return np.arange(self.groups, dtype=np.int32)[:, None] * group_positions


ORDERS: Mapping[str, type[SequenceLayout]] = {"zigzag": SequenceLayout, "natural": NaturalRing}


class RingAttention:
    """Causal attention over a ring alone, forward and backward, of positions in one order."""

    def __init__(self, case: Case, layout: SequenceLayout, positions: int, block: int = DEFAULT_BLOCK):
        self.layout, self.length, self.block = layout, positions, block
        devices = jax.devices()[: layout.devices]
        self.mesh = jax.make_mesh((len(devices),), ("seq",), devices=devices, axis_types=(AxisType.Auto,))
        kv, order = case.model.num_kv_heads, layout.order(positions).reshape(-1)
        self.arrays = [case.heads(n, positions)[:, order] for n in (case.model.num_heads, kv, kv)]
        self.gradient = jax.jit(jax.grad(lambda *arrays: jnp.sum(self.forward(*arrays) ** 2), argnums=(0, 1, 2)))

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        def local(q: Array, k: Array, v: Array) -> Array:
            # Within a window, even one of the whole row, a ring counts on each device what it has to visit, as the
            # natural order needs. Both do here.
            options: dict[str, Any] = dict(layout=self.layout, tensor=1, segments=None, block=self.block)
            return attend_over_sequence(q, k, v, window=self.length, **options)

        spec = P(None, "seq")
        return jax.shard_map(local, mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)

    def __call__(self) -> None:
        jax.block_until_ready(self.gradient(*self.arrays))

    def visits(self) -> np.ndarray:
        """int[device]: how many pairs of blocks each device visits in a forward, counted while it runs."""
        with counted_visits() as visits:
            jax.block_until_ready(jax.jit(self.forward)(*self.arrays))
            jax.effects_barrier()
        return np.asarray([visits[device] for device in range(self.layout.devices)])

    def share(self, visits: int) -> float:
        """Of an even share of the row's causal half: T^2 / 2 / seq pairs of positions."""
        side = attention_blocks.even_block(self.length // self.layout.devices // self.layout.parts, self.block)
        return visits * side**2 / (self.length**2 / 2 / self.layout.devices)


@contextlib.contextmanager
def counted_visits() -> Iterator[Counter[int]]:
    """How often each device of `seq` computes the scores of a pair of blocks, in what is traced in here."""
    counts: Counter[int] = Counter()
    scores = attention_blocks._scores

    def counting(*args: Any) -> Array:
        jax.debug.callback(lambda device: counts.update([int(device)]), lax.axis_index("seq"))
        return scores(*args)

    with mock.patch.object(attention_blocks, "_scores", counting):
        yield counts


def print_modes(case: Case, seconds: float) -> None:
    print(f"the step of {case.model}, one row of {case.positions}")
    print(f"{'seq':<5}{'attention':<12}{'split':>9}{'one device':>14}{'ratio':>8}  95 % interval")
    for plan, timing in measure_modes(case, PLANS, seconds).items():
        low, high = timing.interval()
        split, one = np.median(timing.jaxpar) * 1e3, np.median(timing.plain) * 1e3
        name = f"hybrid({plan.ulysses})" if plan.ulysses > 1 else plan.attention
        interval = f"{low:.3f} - {high:.3f} of {len(timing.plain)} pairs"
        size = plan.shape.sizes["seq"]
        print(f"{size:<5}{name:<12}{split:>6.0f} ms{one:>11.0f} ms{timing.ratio:>8.3f}  {interval}", flush=True)


def print_orders(case: Case, seconds: float) -> None:
    rings = {
        s: {name: RingAttention(case, order(s, 1), case.positions) for name, order in ORDERS.items()} for s in RINGS
    }
    for ring in (ring for both in rings.values() for ring in both.values()):
        ring()
    timings = in_pairs({s: (both["natural"], both["zigzag"]) for s, both in rings.items()}, seconds)
    print(f"\nring attention alone, {case.positions} positions in blocks of {DEFAULT_BLOCK} or less")
    print(f"{'seq':<5}{'order':<10}{'pairs visited, by device':<36}{'of an even share':>17}{'time':>10}")
    for size, both in rings.items():
        low, high = timings[size].interval()
        for name, ring in both.items():
            visits = ring.visits()
            seconds_taken = np.median(timings[size].plain if name == "zigzag" else timings[size].jaxpar)
            row = f"{size:<5}{name:<10}{' '.join(map(str, visits)):<36}{ring.share(visits.max()):>17.2f}"
            print(f"{row}{seconds_taken * 1e3:>7.0f} ms")
        pairs = len(timings[size].plain)
        print(
            f"     natural / zigzag, time: {timings[size].ratio:.3f} ({low:.3f} - {high:.3f} of {pairs} pairs)",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure for, each of the two")
    options = parser.parse_args()
    jaxpar.simulate(8)
    print_modes(Case(), options.seconds)
    print_orders(Case(), options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
