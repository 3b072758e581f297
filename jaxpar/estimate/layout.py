"""The layout of a step: what of a plan, and of the batch it is given, the estimator reads."""

from dataclasses import dataclass, replace

from jaxpar.plan import Plan


@dataclass(frozen=True)
class Remat:
    """What a layer computes again in its backward. `roles`: matrix products (see `Matmul.role`), `share` of them;
    `tensor`: tensor parallelism's collectives too. `layers`: the part of the layers that do so."""

    roles: frozenset[str] = frozenset()
    share: float = 1.0
    attention: bool = False
    elementwise: bool = False
    tensor: bool = False
    layers: float = 1.0


ALL_ROLES = frozenset({"query", "key", "out", "up", "down", "other"})
KEEP_ALL = Remat()
FULL = Remat(ALL_ROLES, attention=True, elementwise=True, tensor=True)
# The scores of attention alone: what Megatron calls selective.
SELECTIVE = Remat(attention=True)
DOTS = Remat(attention=True, elementwise=True)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes and what is spread over them.

    Attributes:
      data: replicas that have rows of their own; experts are spread inside of them, `expert` ways.
      pipe, tensor, seq, expert: devices of the other axes; `expert_tensor`: into how many parts an expert is cut.
      chunks: virtual stages on a device; `schedule`: the pipeline's name.
      ends_are_layers: embedding and head take a layer's place each in the first and the last stage.
      zero: stage of ZeRO; `shard`: over how many of the replicas its shards go, the rest holds copies.
      microbatches: for one replica in a step; `rows` in each of them, `length` positions in a row.
      precision: float32, bfloat16 or fp8.
      split_norms: norms and residuals hold 1 / tensor of the positions.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    seq: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    fill: bool = False
    ends_are_layers: bool = False
    zero: int = 0
    shard: int = 1
    microbatches: int = 1
    rows: int = 1
    length: int = 2048
    precision: str = "bfloat16"
    remat: Remat = KEEP_ALL
    split_norms: bool = False
    attention: str = "ring"
    capacity: float | None = None

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor * self.seq

    @property
    def tokens(self) -> float:
        """Of one microbatch on one device, before `tensor`."""
        return self.rows * self.length / self.seq

    @classmethod
    def of(cls, plan: Plan, rows: int, length: int, devices: int, devices_per_node: int) -> "Layout":
        """The layout of a step of `rows` rows of `length` positions. Raises `PlanError` for what does not divide."""
        plan = plan.resolve(devices)
        sizes = plan.shape.sizes
        data = sizes["data"] * sizes["expert"]
        return cls(
            data=data,
            pipe=sizes["pipe"],
            tensor=sizes["tensor"],
            seq=sizes["seq"],
            expert=sizes["expert"],
            expert_tensor=sizes["tensor"],
            chunks=plan.virtual_stages,
            schedule=plan.pipeline,
            fill=plan.fill,
            zero=plan.zero,
            shard=data // plan.replicas(devices_per_node),
            microbatches=plan.microbatches,
            rows=max(1, rows // (data * plan.microbatches)),
            length=length,
            precision=plan.precision,
            remat=remat_of(plan),
            split_norms=plan.sequence_sharded_norms,
            attention=plan.attention,
            capacity=plan.capacity,
        )


def remat_of(plan: Plan) -> Remat:
    """A layer that saves by name does not repeat what the names of `ctx.attend` and of jaxpar's models keep."""
    if names := plan.saved_names:
        kept = {"qkv": {"query", "key"}, "out": {"out"}}
        roles = ALL_ROLES.difference(*(kept.get(name, ()) for name in names))
        return replace(FULL, roles=roles, attention="attention" not in names, tensor="out" not in names)
    return {"none": KEEP_ALL, "full": FULL, "dots": DOTS}[plan.remat]
