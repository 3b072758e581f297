"""Random questions to the planner, and whether what it offers holds: it is legal, fits when compiled, and equals one
device when it is run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import optax

from experiments.parity_table import make_batch
from jaxpar import Plan, Program, token_shapes
from jaxpar.estimate.hardware import Cluster
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.question import Question
from jaxpar.planner.ranked import Ranked
from jaxpar.planner.search import Search
from jaxpar.planner.sharpen import sharpen
from jaxpar.planner.verify import verify
from jaxpar.testing.parity import compare, loss_and_grads, one_device
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig

Config = LlamaConfig | GPTConfig | MoEConfig
OPTIMIZER = optax.sgd(0.1)
# How many of the best are traced, and how many compiled until one holds.
TRACED = 8


@dataclass(frozen=True)
class Draw:
    """`share`: of the way from the least that a plan is predicted to take to the most; below 0 nothing fits."""

    config: Config
    devices: int
    rows: int
    length: int
    share: float

    def __str__(self) -> str:
        name = type(self.config).__name__.removesuffix("Config")
        sizes = f"{self.config.num_layers} layers of {self.config.embed_dim}, {self.config.num_heads} heads"
        return f"{name}, {sizes}, {self.rows} x {self.length} on {self.devices}, budget at {self.share:.0%}"

    @property
    def question(self) -> Question:
        cluster = Cluster.parse(f"1x{self.devices}xcpu")
        return Question(self.config.build, OPTIMIZER, cluster, token_shapes(self.rows, self.length), Plan())


def draws(seed: int, devices: tuple[int, ...]) -> Iterator[Draw]:
    """Without an end."""
    rng = random.Random(seed)
    while True:
        yield Draw(
            _config(rng), rng.choice(devices), rng.choice([1, 6, 12, 16, 20, 24, 48]), rng.choice([24, 32, 40]),
            rng.choice([-0.3, 0.05, 0.3, 0.6, 1.0]),
        )  # fmt: skip


def _config(rng: random.Random) -> Config:
    kv_heads = rng.choice([1, 2, 3, 4])
    heads = kv_heads * rng.choice([1, 2, 3])
    layers, embed, vocab = rng.randint(1, 7), rng.choice([16, 24]), rng.choice([61, 100])
    if rng.random() < 0.25:
        return GPTConfig(vocab, layers, embed, heads if embed % heads == 0 else 4, 2 * embed, 64)
    sizes = (vocab, layers, embed, heads, kv_heads, 4, rng.choice([24, 40]))
    if rng.random() < 0.5:
        return LlamaConfig(*sizes)
    return MoEConfig(
        *sizes, num_experts=rng.choice([2, 3, 4, 6]), experts_per_token=rng.randint(1, 2), moe_mlp_dim=12,
        balance_coef=0.1,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """`offered`: the first plan that the compiler has confirmed; `wrong`: what does not hold, "" if all does."""

    ranked: Ranked
    offered: Candidate | None
    wrong: str

    def __str__(self) -> str:
        dropped = f"; {len(self.ranked.dropped)} dropped when traced or compiled" if self.ranked.dropped else ""
        if self.offered is None:
            return f"no plan: {self.ranked.reason or 'none held'}{dropped}"
        peak, limit = self.offered.peak_bytes, self.offered.limit
        return f"{self.offered.plan}: {peak / 1e3:.0f} of {limit / 1e3:.0f} kB{dropped}"


def outcome(draw: Draw) -> Outcome:
    """Asks, as `jaxpar plan` does, and runs what is offered on as many devices."""
    ranked = Search(draw.question).run()
    totals = [candidate.memory.total for candidate in (*ranked.found, *ranked.near)]
    if totals:
        least, most = min(totals), max(totals)
        budget = int(least + draw.share * (most - least)) if draw.share >= 0 else int(least * (1 + draw.share))
        ranked = Search(replace(draw.question, budget=budget)).run()
    ranked = verify(sharpen(ranked, TRACED), 1)
    offered = next((candidate for candidate in ranked if candidate.report is not None), None)
    return Outcome(ranked, offered, _wrong(draw, ranked, offered))


def _wrong(draw: Draw, ranked: Ranked, offered: Candidate | None) -> str:
    if offered is None:
        told = ranked.reason or " ".join(why for _, why in ranked.dropped)
        return "" if any(c.isdigit() for c in told) else "there is no plan, and no reason with numbers"
    if not offered.fits:
        return f"it takes {offered.peak_bytes} bytes of {offered.limit}"
    program = Program(draw.config.build, OPTIMIZER, offered.plan)
    program.validate(token_shapes(draw.rows, draw.length), draw.devices)
    batch = make_batch("uneven", draw.rows, draw.config.vocab_size, draw.length)
    differences = compare(*loss_and_grads(program, batch), *loss_and_grads(one_device(program), batch))
    return "; ".join(map(str, differences))
