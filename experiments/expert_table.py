"""The parity table of experts as values: every router and exchange on meshes of all kinds, and its page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax

from experiments.pairwise import Row, pairwise
from experiments.parity_table import make_batch
from jaxpar import Capacity, Plan, Program
from models.moe import MoEConfig

VOCAB, LENGTH, ROWS = 61, 16, 8


def model(**options: Any) -> MoEConfig:
    sizes = {"embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 24, "moe_mlp_dim": 12}
    return MoEConfig(VOCAB, **{"num_layers": 2, "num_experts": 8} | sizes | options)


@dataclass(frozen=True)
class Case:
    """A model, and its batches of several kinds."""

    config: MoEConfig
    kinds: tuple[str, ...] = ("uneven",)

    @property
    def build(self) -> Any:
        return self.config.build


CASES: dict[str, Case] = {
    "softmax": Case(
        model(num_shared_experts=1, balance_coef=0.1, router_z_coef=0.01), ("uneven", "packed", "one kind of token")
    ),
    "softmax of the best": Case(model(router="topk_softmax", balance_coef=0.1, experts_per_token=3)),
    "sigmoid, groups, bias, jitter": Case(
        model(
            num_layers=4,
            num_dense_layers=2,
            router="sigmoid",
            expert_groups=4,
            groups_per_token=2,
            bias_rate=0.01,
            router_jitter=0.1,
            routed_scale=2.5,
        )
    ),
    "expert choice": Case(model(router="expert_choice")),
}
# No plan in parts: these are cells by themselves.
BY_STEP = "softmax, balanced over the step"

FACTORS: dict[str, list[Any]] = {
    "case": list(CASES),
    "mesh": [
        "expert=8",
        "data=2,expert=4",
        "data=2,tensor=2,expert=2",
        "data=2,seq=2,expert=2",
        "tensor=2,seq=2,expert=2",
        "pipe=2,tensor=2,expert=2",
        "pipe=2,expert=4",
        "pipe=2,seq=2,expert=2",
    ],
    "schedule": ["1f1b", "zero_bubble"],
    "exchange": ["dropless", "capacity"],
    "zero": [0, 1, 2, 3],
    "microbatches": [1, 2],
    "remat": ["none", "dots", "full"],
}
CASES[BY_STEP] = Case(model(balance="step", balance_coef=0.1), ("uneven", "packed"))


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    case: str
    mesh: str
    schedule: str
    exchange: str
    zero: int
    microbatches: int
    remat: str

    def __str__(self) -> str:
        return ", ".join(map(str, (self.case, self.mesh, self.schedule, self.exchange, f"zero {self.zero}")))

    @property
    def plan(self) -> Plan:
        return Plan(
            self.mesh,
            zero=self.zero,
            microbatches=self.microbatches,
            pipeline=self.schedule,
            remat=self.remat,
            # Large enough for all pairs: what is dropped would differ from one device.
            experts=Capacity(8.0) if self.exchange == "capacity" else "dropless",  # type: ignore[arg-type]
        )

    @property
    def program(self) -> Program:
        return Program(CASES[self.case].build, optax.sgd(0.1), self.plan)


def cells() -> Iterator[Cell]:
    """A cover in which every two choices that are allowed together meet."""
    for row in pairwise(FACTORS, allowed):
        yield Cell(**row)
    for mesh, exchange, zero, remat in (
        ("data=2,expert=4", "dropless", 3, "none"),
        ("data=2,seq=2,expert=2", "capacity", 2, "full"),
        ("tensor=2,seq=2,expert=2", "dropless", 1, "dots"),
    ):
        yield Cell(BY_STEP, mesh, "1f1b", exchange, zero, 1, remat)


def allowed(row: Row) -> bool:
    """A schedule needs a pipeline, and every device a row of each microbatch."""
    sizes = dict(part.split("=") for part in row["mesh"].split(","))
    parts = int(sizes.get("data", 1)) * int(sizes["expert"]) * row["microbatches"]
    return ("pipe" in row["mesh"] or row["schedule"] == "1f1b") and ROWS % parts == 0


def batch(kind: str) -> dict[str, np.ndarray]:
    made = make_batch("packed" if kind == "packed" else "uneven", ROWS, VOCAB, LENGTH)
    return made | {"tokens": np.full_like(made["tokens"], 5)} if kind == "one kind of token" else made


HEAD = """# Parity of experts

Loss and gradients of mixtures of experts against the same model, batch and seed on one device in one microbatch. A cell
is the largest error over the loss and all gradient leaves, as a share of what is allowed: 1e-5 of the leaf's largest
magnitude, plus 1e-7. **Above 1 would be a failure.** Float32, matrix products at highest precision, eight simulated CPU
devices, SGD: a factor would show.

The cells are a cover of all combinations in which every two choices that are allowed together meet: {factors}.
*capacity* is large enough to drop nothing.

The cases: *softmax* has a shared expert, a balance loss and a z-loss, and is the largest of three batches (uneven
weights; packed documents and padding; all tokens alike, so that two experts get everything in several rounds, and six
nothing); *softmax of the best* sends a token to three experts; *sigmoid* has two dense layers before two with experts,
four groups, a bias and jitter, and the gradient of the bias is what was counted. *softmax, balanced over the step* has
a balance loss that takes all rows at once, and cells of its own, on three meshes.

- Measured with jax {jax}, jaxlib {jaxlib}, flax {flax} by `python -m experiments.expert_parity`.

**{count} cells, {failed} failed.** Largest: {worst:.2f} ({where}).

| case | mesh | schedule | exchange | zero | microbatches | remat | share |
|---|---|---|---|---|---|---|---|
{lines}
"""


def page(shares: Mapping[Cell, float]) -> str:
    """Markdown: a line for every cell."""
    where, worst = max(shares.items(), key=lambda item: item[1])
    return HEAD.format(
        factors="; ".join(f"{name} {', '.join(map(str, values))}" for name, values in FACTORS.items()),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flax=flax.__version__,
        count=len(shares),
        failed=sum(not share <= 1 for share in shares.values()),
        worst=worst,
        where=where,
        lines="\n".join(_line(cell, shares[cell]) for cell in sorted(shares, key=lambda c: (c.case, c.mesh))),
    )


def _line(cell: Cell, share: float) -> str:
    schedule = cell.schedule if "pipe" in cell.mesh else ""
    values = (cell.case, cell.mesh, schedule, cell.exchange, cell.zero, cell.microbatches, cell.remat)
    shown = f"{share:.2f}" if share <= 1 else f"**{share:.2f}**"
    return "| " + " | ".join(map(str, (*values, shown))) + " |"
