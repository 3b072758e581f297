"""The plans whose predicted memory is held against the compiler's: simulated, published models on H100s, and drawn."""

import random
from dataclasses import dataclass
from typing import Any

import optax

from jaxpar import Capacity, Hybrid, Pipeline, Plan, PlanError, Program, Zero, token_shapes
from jaxpar.mesh import MeshShape
from jaxpar.pipeline import SCHEDULES, legal_microbatches
from models.layers import RopeScaling
from models.llama import LlamaConfig
from models.moe import MoEConfig


def _llama3(layers: int, embed: int, heads: int, mlp: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, num_layers=layers, embed_dim=embed, num_heads=heads, num_kv_heads=8, head_dim=128,
        mlp_dim=mlp, rope_theta=500000.0, rope_scaling=RopeScaling(),
    )  # fmt: skip


_SMALL: dict[str, Any] = dict(
    vocab_size=4096, num_layers=8, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=704
)
MODELS: dict[str, LlamaConfig] = {
    "small": LlamaConfig(**_SMALL),
    "small experts": MoEConfig(**_SMALL, num_experts=8, experts_per_token=2, moe_mlp_dim=512),
    "small, dense first": MoEConfig(**_SMALL, num_experts=8, experts_per_token=2, moe_mlp_dim=512, num_dense_layers=4),
    "Llama-3 8B": _llama3(32, 4096, 32, 14336),
    "Llama-3 70B": _llama3(80, 8192, 64, 28672),
    "Llama-3 405B": _llama3(126, 16384, 128, 53248),
    "Mixtral 8x22B": MoEConfig(
        vocab_size=32768, num_layers=56, embed_dim=6144, num_heads=48, num_kv_heads=8, head_dim=128, mlp_dim=16384,
        rope_theta=1000000.0, num_experts=8, experts_per_token=2, moe_mlp_dim=16384, router="topk_softmax",
    ),
}  # fmt: skip
OPTIMIZER = optax.adamw(1e-4)


@dataclass(frozen=True)
class Case:
    """One program: `rows` of `length` positions a step on `cluster`."""

    group: str
    model: str
    plan: Plan
    cluster: str
    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.model}, {self.plan}, {self.rows} x {self.length} on {self.cluster}"

    @property
    def program(self) -> Program:
        return Program(MODELS[self.model].build, OPTIMIZER, self.plan)


def cases() -> list[Case]:
    return [*_simulated(), *_published(), *_drawn(10)]


def _simulated() -> list[Case]:
    bf16: dict[str, Any] = dict(precision="bfloat16")
    plans = [
        Plan("data=8"),
        Plan("data=8", zero=1),
        Plan("data=8", zero=2, microbatches=2),
        Plan("data=8", zero=3, microbatches=2),
        Plan("data=8", zero=3, remat="full", **bf16),
        Plan("data=4,tensor=2", zero=3, microbatches=4, remat="dots"),
        Plan("data=2,tensor=4", zero=1, microbatches=2, sequence_sharded_norms=True),
        Plan("tensor=8", remat="full", microbatches=4),
        Plan("data=4,tensor=2", remat="named:attention,mlp", zero=2, **bf16),
        Plan("data=4,seq=2", zero=3, remat="full", attention="ring"),
        Plan("data=2,seq=4", zero=1, attention="ulysses", microbatches=2),
        Plan("seq=4,tensor=2", attention="allgather", zero=2),
        Plan("seq=8", attention=Hybrid(ulysses=2), zero=3, remat="dots"),  # type: ignore[arg-type]
        Plan("data=4,pipe=2", microbatches=4),
        Plan("data=2,pipe=4", pipeline="gpipe", microbatches=4, zero=1),
        Plan("data=2,pipe=4", pipeline=Pipeline("interleaved", virtual_stages=2), microbatches=4, zero=2),  # type: ignore[arg-type]
        Plan("data=2,pipe=2,tensor=2", pipeline="zero_bubble", microbatches=4, remat="full"),
        Plan("data=2,pipe=2,seq=2", microbatches=4, zero=3, remat="full"),
        Plan("data=2,pipe=4", pipeline="zero_bubble_v", virtual_stages=2, microbatches=8, remat="dots"),
        Plan("pipe=8", microbatches=8, remat="dots", **bf16),
        Plan("data=8", param_dtype="bfloat16", zero=2, **bf16),
        Plan("data=8", zero=1, reduce_dtype="bfloat16"),
        Plan("data=8", zero=3, offload=("optimizer",)),
    ]
    experts = [
        Plan("data=2,expert=4", zero=1),
        Plan("data=4,tensor=2", zero=3, remat="full"),
        Plan("data=2,expert=2,tensor=2", zero=2, microbatches=2, experts=Capacity(1.25)),  # type: ignore[arg-type]
        Plan("expert=4,pipe=2", microbatches=4, remat="dots"),
        Plan("expert=2,seq=2,data=2", zero=3, remat="full"),
    ]
    two = [Plan("data=4,expert=2", zero=3), Plan("pipe=2,expert=2,tensor=2", microbatches=4)]
    by_model = [("small", plans), ("small experts", experts), ("small, dense first", two)]
    return [Case("simulated", model, plan, "1x8xcpu", 32, 512) for model, of_model in by_model for plan in of_model]


def _published() -> list[Case]:
    def bf16(mesh: str, **fields: Any) -> Plan:
        return Plan(mesh, precision="bfloat16", **fields)

    norms: dict[str, Any] = dict(sequence_sharded_norms=True)
    rows = [
        ("Llama-3 8B", bf16("data=-1", zero=3, remat="full"), 1, 8, 8192),
        ("Llama-3 8B", bf16("data=-1", zero=2, remat="dots", microbatches=2), 1, 16, 4096),
        ("Llama-3 8B", bf16("data=-1,tensor=2", zero=1, remat="named:attention", microbatches=4), 2, 32, 8192),
        ("Llama-3 8B", bf16("data=-1,tensor=4", zero=3, microbatches=4, remat="full", **norms), 4, 32, 8192),
        ("Llama-3 8B", bf16("data=-1,seq=4", zero=3, remat="full"), 4, 8, 65536),
        ("Llama-3 8B", bf16("data=-1,pipe=2,tensor=4", zero=2, remat="dots", microbatches=8), 4, 32, 4096),
        ("Llama-3 8B", bf16("data=-1,pipe=4", pipeline="zero_bubble", zero=1, microbatches=8, remat="full"), 2, 32, 4096),  # noqa: E501
        ("Llama-3 8B", Plan("data=-1", precision="fp8", zero=3, remat="full"), 1, 8, 8192),
        ("Llama-3 70B", bf16("data=-1", zero=Zero(3, within_node=False), remat="full"), 32, 256, 8192),
        ("Llama-3 70B", bf16("data=-1,tensor=8", zero=3, remat="full", **norms), 16, 64, 8192),
        ("Llama-3 70B", bf16("data=-1,tensor=8,pipe=4", zero=1, microbatches=16, remat="full", **norms), 16, 64, 8192),
        (
            "Llama-3 70B",
            bf16("data=-1,tensor=4,pipe=4", pipeline=Pipeline("interleaved", virtual_stages=5), zero=2,
                 microbatches=16, remat="dots", **norms), 32, 256, 4096,
        ),
        ("Llama-3 70B", bf16("data=-1,tensor=8,seq=4", zero=3, remat="full", attention="ring", **norms), 32, 8, 131072),
        ("Llama-3 70B", bf16("data=-1,tensor=8", zero=1, microbatches=2, remat="named:attention", **norms), 8, 32, 8192),  # noqa: E501
        ("Llama-3 405B", bf16("data=-1,tensor=8", zero=3, remat="full", **norms), 256, 256, 8192),
        ("Llama-3 405B", bf16("data=-1,tensor=8,pipe=16", zero=1, microbatches=32, remat="full", **norms), 512, 1024, 8192),  # noqa: E501
        ("Llama-3 405B", bf16("data=-1,tensor=8,pipe=8", zero=3, microbatches=16, remat="full", **norms), 256, 512, 8192),  # noqa: E501
        ("Mixtral 8x22B", bf16("data=-1,expert=8", zero=3, remat="full"), 32, 256, 4096),
        ("Mixtral 8x22B", bf16("data=-1,expert=8,tensor=2", zero=2, microbatches=2, remat="full"), 64, 512, 4096),
        ("Mixtral 8x22B", bf16("data=-1,expert=8,pipe=4", zero=1, microbatches=8, remat="full"), 32, 512, 4096),
    ]  # fmt: skip
    return [Case("H100", model, plan, f"{n}x8xh100", r, length) for model, plan, n, r, length in rows]


def _drawn(count: int, seed: int = 405) -> list[Case]:
    """Legal plans of a small model on H100s, half of them, and on simulated devices."""
    draw, found = random.Random(seed), list[Case]()
    while len(found) < count:
        cluster = ("1x8xcpu", "1x8xh100")[len(found) % 2]
        case = Case("drawn", "small", *_draw(draw), cluster, 32, draw.choice([256, 512, 1024]))  # type: ignore[arg-type]
        try:
            case.program.validate(token_shapes(case.rows, case.length), 8)
        except PlanError:
            continue
        found.append(case)
    return found


def _draw(draw: random.Random) -> tuple[Plan]:
    while True:
        mesh = draw.choice(["data=8", "data=4,tensor=2", "data=2,tensor=4", "data=4,seq=2", "data=4,pipe=2",
                            "data=2,pipe=2,tensor=2", "data=2,pipe=4", "data=2,seq=2,tensor=2"])  # fmt: skip
        schedule = draw.choice(SCHEDULES)
        virtual = 2 if schedule == "interleaved" and "pipe" in mesh else 1
        stages = MeshShape.parse(mesh).pipe
        try:
            microbatches = draw.choice([m for m in (1, 2, 4, 8) if m in legal_microbatches(schedule, stages, virtual)])
            plan = Plan(
                mesh, zero=draw.randrange(4), microbatches=microbatches, pipeline=schedule, virtual_stages=virtual,
                attention=draw.choice(["ring", "ulysses", "allgather"]), remat=draw.choice(["none", "dots", "full"]),
                precision=draw.choice(["float32", "bfloat16"]), sequence_sharded_norms=draw.random() < 0.5,
            )  # fmt: skip
        except (PlanError, IndexError):
            continue
        return (plan,)
