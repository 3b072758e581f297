"""How a token's experts are chosen: the routers of Mixtral, Qwen3-MoE, DeepSeek-V2 and -V3, and expert choice.

Everything here is float32. Letters: B rows, T positions, E experts, K experts of a token, G groups of experts.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

import jaxpar

Kind = Literal["softmax", "topk_softmax", "sigmoid", "expert_choice"]

_table = jaxpar.named(nnx.initializers.normal(stddev=0.02), "embed", None, float32=True)


@dataclass(frozen=True)
class RouterConfig:
    """Attributes:
    kind: what a token's weights of its experts are: `softmax` over all experts, of which the best are taken (Qwen3,
      DeepSeek-V2), `topk_softmax` over the best alone (Mixtral), `sigmoid` of each (DeepSeek-V3). With
      `expert_choice` every expert takes the tokens of a row that it scores best, as many as all get on average, and a
      token keeps at most twice `chosen` of those who took it (Zhou et al., 2022); a token's experts then depend on
      later tokens of its row, which a decoder that generates does not have.
    normalize: weights of a token's experts add up to 1; `topk_softmax` does so by itself.
    groups, chosen_groups: experts are chosen from so many of the groups, those whose two best add up to most
      (DeepSeek-V3).
    bias_rate: how far each step moves a bias of the choice, not of the weights, towards experts that got fewer tokens
      than others in the whole step (Wang et al., 2024); 0: no bias.
    jitter: the router sees its input times a factor between 1 - jitter and 1 + jitter when training (Fedus et al.,
      Switch Transformer, 2021).
    """

    experts: int
    chosen: int
    kind: Kind = "softmax"
    normalize: bool = True
    groups: int = 1
    chosen_groups: int = 1
    bias_rate: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise jaxpar.ConfigError(f"experts_per_token={self.chosen}: needs 1 to num_experts={self.experts}")
        if self.groups < 1 or self.experts % self.groups:
            raise jaxpar.ConfigError(
                f"expert_groups={self.groups} does not divide num_experts={self.experts}: choose a divisor of it"
            )
        most = self.chosen_groups * (self.experts // self.groups)
        if not 1 <= self.chosen_groups <= self.groups or most < self.chosen:
            raise jaxpar.ConfigError(
                f"groups_per_token={self.chosen_groups} of expert_groups={self.groups}: needs 1 to {self.groups}, with "
                f"at least experts_per_token={self.chosen} experts in them; found {most}"
            )


class Router(nnx.Module):
    def __init__(self, config: RouterConfig, embed_dim: int, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_table(rngs.params(), (embed_dim, config.experts), jnp.float32))
        self.bias = jaxpar.steered(config.experts, config.bias_rate) if config.bias_rate else None
        self.config = config

    def __call__(
        self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context
    ) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"], Float[Array, "b t e"]]:
        """-> each token's experts (E: none), their weights, and the scores before softmax or sigmoid."""
        x_BTD = ctx.jitter(x_BTD.astype(jnp.float32), self.config.jitter)
        logits_BTE = jnp.einsum("btd,de->bte", x_BTD, self.kernel[...])
        if self.config.kind == "expert_choice":
            return *_chosen_by_experts(logits_BTE, self.config, ctx), logits_BTE
        bias = None if self.bias is None else self.bias[...]
        expert_BTK, weight_BTK = choose(logits_BTE, self.config, bias)
        if self.bias is not None:
            weight_BTK = jaxpar.steer(weight_BTK, self.bias[...], jnp.sum(counted(expert_BTK, logits_BTE, ctx), (0, 1)))
        return expert_BTK, weight_BTK, logits_BTE


def scores(logits_BTE: Float[Array, "b t e"], kind: Kind) -> Float[Array, "b t e"]:
    return jax.nn.sigmoid(logits_BTE) if kind == "sigmoid" else jax.nn.softmax(logits_BTE, axis=-1)


def choose(
    logits_BTE: Float[Array, "b t e"], config: RouterConfig, bias_E: Float[Array, " e"] | None = None
) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
    """-> each token's experts and their weights."""
    scores_BTE = scores(logits_BTE, config.kind)
    liked_BTE = jax.lax.stop_gradient(scores_BTE if bias_E is None else scores_BTE + bias_E[None, None])
    if config.groups > 1:
        liked_BTE = jnp.where(_best_groups(liked_BTE, config), liked_BTE, -jnp.inf)
    expert_BTK = jax.lax.top_k(liked_BTE, config.chosen)[1]
    if config.kind == "topk_softmax":
        return expert_BTK, jax.nn.softmax(jnp.take_along_axis(logits_BTE, expert_BTK, axis=-1), axis=-1)
    weight_BTK = jnp.take_along_axis(scores_BTE, expert_BTK, axis=-1)
    if config.normalize:
        weight_BTK = weight_BTK / jnp.sum(weight_BTK, axis=-1, keepdims=True)
    return expert_BTK, weight_BTK


def _best_groups(liked_BTE: Float[Array, "b t e"], config: RouterConfig) -> Array:
    """bool[b, t, e]: whether an expert is in one of the token's groups."""
    grouped = liked_BTE.reshape(*liked_BTE.shape[:-1], config.groups, -1)
    worth_BTG = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    best = jax.lax.top_k(worth_BTG, config.chosen_groups)[1]
    here_BTG = jnp.any(jax.nn.one_hot(best, config.groups, dtype=bool), axis=-2)
    return jnp.repeat(here_BTG, grouped.shape[-1], axis=-1)


def _chosen_by_experts(
    logits_BTE: Float[Array, "b t e"], config: RouterConfig, ctx: jaxpar.Context
) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
    scores_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    liked_BTE = jnp.where(seen(logits_BTE, ctx)[..., None] > 0, scores_BTE, -1.0)
    liked_BES = jnp.moveaxis(ctx.row_gather(liked_BTE), 1, -1)
    each = -(-liked_BES.shape[-1] * config.chosen // config.experts)
    # By index: a score that XLA computes twice may differ in its last bit.
    best_BEC = jax.lax.top_k(liked_BES, min(each, liked_BES.shape[-1]))[1]
    taken_BES = jnp.zeros(liked_BES.shape, bool)
    taken_BES = jnp.put_along_axis(taken_BES, best_BEC, True, axis=-1, inplace=False)
    taken_BTE = jnp.moveaxis(ctx.row_part(taken_BES, -1), -1, 1) & (liked_BTE >= 0)
    most = min(config.experts, 2 * config.chosen)
    weight_BTK, expert_BTK = jax.lax.top_k(jnp.where(taken_BTE, scores_BTE, 0.0), most)
    return jnp.where(weight_BTK > 0, expert_BTK, config.experts), weight_BTK


def seen(like_BTE: Float[Array, "b t e"], ctx: jaxpar.Context) -> Float[Array, "b t"]:
    """1 for a token, 0 for padding."""
    return jnp.ones(like_BTE.shape[:2]) if ctx.segments is None else (ctx.segments > 0).astype(jnp.float32)


def counted(
    expert_BTK: Int[Array, "b t k"], like_BTE: Float[Array, "b t e"], ctx: jaxpar.Context
) -> Float[Array, "b t e"]:
    """How often a token, if it is no padding, goes to each expert: 0 or 1."""
    chosen = jnp.sum(jax.nn.one_hot(expert_BTK, like_BTE.shape[-1]), axis=2)
    return chosen * seen(like_BTE, ctx)[..., None]
