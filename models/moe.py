"""A decoder whose layers are mixtures of experts, after Mixtral, Qwen3-MoE and DeepSeek. Single-device code.

Letters: B rows, T positions, D embed, E experts, K experts of a token, F mlp of an expert, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

import jaxpar
from models.layers import RMSNorm, normed, residual
from models.llama import MLP, Attention, Block, LlamaConfig
from models.router import Kind, Router, RouterConfig, counted, scores, seen

Kernel = Callable[[Array], Array]

_kernel = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
_table = nnx.initializers.normal(stddev=0.02)


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """A Llama whose layers after the first `num_dense_layers` have experts in place of the MLP.

    Attributes:
      moe_mlp_dim: of each expert; `num_shared_experts` more of this size see every token.
      router, normalize_weights, expert_groups, groups_per_token, bias_rate, router_jitter: see `RouterConfig`.
      routed_scale: factor of what the routed experts give.
      balance_coef: of a loss that is least when all experts are equally liked (Fedus et al., Switch Transformer, 2021).
      balance: where they are to be: `row`, within each row (additive over rows, so that it is the same under any split,
        as in DeepSeek-V2), or `step`, over all rows of a step, as in Switch Transformer; that is no sum over
        microbatches, so that plans need microbatches=1 and pipe=1. Evaluation is by row.
      router_z_coef: of the mean squared log-sum-exp of the router's scores (Zoph et al., ST-MoE, 2022).
      log_load: metrics `load/0`, `load/1`, ...: each expert's share of all choices, over layers, tokens and a step.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    moe_mlp_dim: int = 32
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    router: Kind = "softmax"
    normalize_weights: bool = True
    expert_groups: int = 1
    groups_per_token: int = 1
    bias_rate: float = 0.0
    router_jitter: float = 0.0
    routed_scale: float = 1.0
    balance_coef: float = 0.01
    balance: Literal["row", "step"] = "row"
    router_z_coef: float = 0.0
    log_load: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.routing  # noqa: B018 raises
        if self.balance not in ("row", "step"):
            raise jaxpar.ConfigError(f"balance={self.balance!r}: needs 'row' or 'step'")
        if not 0 <= self.num_dense_layers < self.num_layers:
            raise jaxpar.ConfigError(
                f"num_dense_layers={self.num_dense_layers}: needs 0 to {self.num_layers - 1}, one less than num_layers"
            )

    @property
    def routing(self) -> RouterConfig:
        """Raises `ConfigError`."""
        return RouterConfig(
            self.num_experts,
            self.experts_per_token,
            self.router,
            self.normalize_weights,
            self.expert_groups,
            self.groups_per_token,
            self.bias_rate,
            self.router_jitter,
        )

    def build(self, rngs: nnx.Rngs) -> "MoE":  # type: ignore[override]
        return MoE(self, rngs=rngs)


class Experts(nnx.Module):
    """Router, routed experts, shared experts."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        c = config
        wide, narrow = (c.num_experts, c.embed_dim, c.moe_mlp_dim), (c.num_experts, c.moe_mlp_dim, c.embed_dim)
        into = jaxpar.named(_kernel, "experts", "embed", "mlp")
        back = jaxpar.named(_kernel, "experts", "mlp", "embed")
        self.router = Router(c.routing, c.embed_dim, rngs=rngs)
        self.gate, self.up = (nnx.Param(into(rngs.params(), wide, jnp.float32)) for _ in range(2))
        self.down = nnx.Param(back(rngs.params(), narrow, jnp.float32))
        shared = replace(c, mlp_dim=c.moe_mlp_dim * c.num_shared_experts)
        self.shared = MLP(shared, rngs=rngs) if c.num_shared_experts else None
        self.needs_whole_step = c.balance == "step" and c.balance_coef != 0
        self.config = c

    def __call__(
        self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context
    ) -> tuple[Float[Array, "b t d"], dict[str, Array]]:
        expert_BTK, weight_BTK, logits_BTE = self.router(x_BTD, ctx)
        weight_BTK = weight_BTK * self.config.routed_scale
        y_BTD, counts = ctx.route(x_BTD, expert_BTK, weight_BTK, gated, self.gate, self.up, self.down)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD, ctx)
        return y_BTD, counts | self._totals(logits_BTE, expert_BTK, ctx)

    def _totals(
        self, logits_BTE: Float[Array, "b t e"], expert_BTK: Int[Array, "b t k"], ctx: jaxpar.Context
    ) -> dict[str, Array]:
        c, totals = self.config, dict[str, Array]()
        chosen_BTE, seen_BT = counted(expert_BTK, logits_BTE, ctx), seen(logits_BTE, ctx)
        if c.balance_coef:
            # A ragged batch is evaluated in parts, which have no step.
            loss = balance_of_step if c.balance == "step" and ctx.train else balance
            totals["balance"] = loss(scores(logits_BTE, c.router), chosen_BTE, c.experts_per_token, seen_BT, ctx)
        if c.router_z_coef:
            totals["router_z"] = jnp.sum(seen_BT * jax.nn.logsumexp(logits_BTE, axis=-1) ** 2)
        if c.log_load:
            totals |= {f"load/{e}": total for e, total in enumerate(jnp.sum(chosen_BTE, axis=(0, 1)))}
        return totals


def gated(rows: Array, gate: Kernel, up: Kernel, down: Kernel) -> Array:
    """What an expert does to its rows."""
    return down(nnx.silu(gate(rows)) * up(rows))


def balance(
    scores_BTE: Float[Array, "b t e"],
    chosen_BTE: Float[Array, "b t e"],
    chosen: int,
    seen_BT: Float[Array, "b t"],
    ctx: jaxpar.Context,
) -> Float[Array, ""]:
    """Summed over rows: experts x (share of the row's choices) . (mean score); 1 a row if all are equally liked.

    `chosen`: how many experts a token has. Scores of a token are taken as shares of their sum, which softmax's are. A
    row without tokens adds 0.
    """
    experts = scores_BTE.shape[-1]
    counts_BE, share_BE, tokens_B = ctx.row_sum(_by_row(scores_BTE, chosen_BTE, seen_BT))
    tokens_B = jnp.maximum(tokens_B, 1.0)
    rows_B = experts / chosen * jnp.sum(counts_BE * share_BE, axis=-1) / tokens_B**2
    return jnp.sum(rows_B) / ctx.row_parts


def balance_of_step(
    scores_BTE: Float[Array, "b t e"],
    chosen_BTE: Float[Array, "b t e"],
    chosen: int,
    seen_BT: Float[Array, "b t"],
    ctx: jaxpar.Context,
) -> Float[Array, ""]:
    """As `balance`, with shares and mean scores over all tokens of the step; counted once for each row at hand."""
    experts = scores_BTE.shape[-1]
    counts_E, share_E, tokens = ctx.step_sum([jnp.sum(x, axis=0) for x in _by_row(scores_BTE, chosen_BTE, seen_BT)])
    value = experts / chosen * jnp.sum(counts_E * share_E) / jnp.maximum(tokens, 1.0) ** 2
    return value * scores_BTE.shape[0] / ctx.row_parts


def _by_row(scores_BTE: Array, chosen_BTE: Array, seen_BT: Array) -> tuple[Array, Array, Array]:
    """Of each row at hand: how often experts were chosen, their shares of the scores, and its tokens."""
    share_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    return jnp.sum(chosen_BTE, axis=1), jnp.sum(share_BTE * seen_BT[..., None], axis=1), jnp.sum(seen_BT, axis=1)


class MoEBlock(nnx.Module):
    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(
        self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context
    ) -> tuple[Float[Array, "b t d"], dict[str, Array]]:
        x_BTD = residual(x_BTD + residual(self.attention(normed(self.attention_norm, x_BTD, ctx), ctx), ctx), ctx)
        x_BTD = jaxpar.save(x_BTD, "out")
        y_BTD, totals = self.experts(normed(self.mlp_norm, x_BTD, ctx), ctx)
        return residual(x_BTD + residual(y_BTD, ctx), ctx), totals


class MoE(nnx.Module):
    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        c = config
        table = jaxpar.named(_table, "vocab", "embed")
        shape = (c.vocab_size, c.embed_dim)
        self.embedding = nnx.Param(table(rngs.params(), shape, jnp.float32))
        if c.num_dense_layers:
            self.dense_blocks = jaxpar.stack(Block, c.num_dense_layers, c, rngs=rngs)
        self.blocks = jaxpar.stack(MoEBlock, c.num_layers - c.num_dense_layers, c, rngs=rngs)
        self.norm = RMSNorm(c.embed_dim, epsilon=c.norm_epsilon, rngs=rngs)
        self.unembedding = None if c.tie_embeddings else nnx.Param(table(rngs.params(), shape, jnp.float32))
        self.config = c

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        return residual(jaxpar.embedding_lookup(self.embedding[...], batch["tokens"]), ctx)

    def head(self, x_BTD: Float[Array, "b t d"], batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        x_BTD = normed(self.norm, x_BTD, ctx)
        return {"cross_entropy": jaxpar.cross_entropy(x_BTD, self.table_VD, batch["targets"], batch["weights"])}

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        """Of balance and the router's z, the mean over layers, and over rows or tokens."""
        c = self.config
        layers, tokens = c.num_layers - c.num_dense_layers, batch["tokens"]
        segments = batch.get("segments", jnp.ones_like(tokens))
        found = {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"]))}
        if c.balance_coef:
            found["balance"] = jaxpar.Term(jnp.float32(layers * tokens.shape[0]), c.balance_coef)
        if c.router_z_coef:
            found["router_z"] = jaxpar.Term(jnp.sum(segments > 0).astype(jnp.float32) * layers, c.router_z_coef)
        # Shares, of all pairs of tokens and experts, for a person to see.
        pairs = jnp.sum(segments > 0).astype(jnp.float32) * layers * c.experts_per_token
        shares = ["routed", "dropped", "overflow", *(f"load/{e}" for e in range(c.num_experts) if c.log_load)]
        return found | {name: jaxpar.Term(pairs, coef=0.0) for name in shares}

    @property
    def table_VD(self) -> Float[Array, "v d"]:
        return (self.embedding if self.unembedding is None else self.unembedding)[...]

    def logits(self, tokens: Int[Array, "b t"], ctx: jaxpar.Context) -> Float[Array, "b t v"]:
        """Float32 scores of every next token, on one device."""
        x_BTD = self.embed({"tokens": tokens}, ctx)
        for stack in ([self.dense_blocks] if self.config.num_dense_layers else []) + [self.blocks]:
            x_BTD = stack(x_BTD, ctx)
        return jnp.einsum(
            "btd,vd->btv",
            self.norm(
                x_BTD,
            ),
            self.table_VD,
            preferred_element_type=jnp.float32,
        )
