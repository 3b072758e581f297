"""A Llama-style decoder: RMS norm, rotary positions, grouped-query attention, SwiGLU. Single-device code.

Letters: B rows, T positions, D embed, H query heads, K kv heads, h head dim, F mlp, V vocabulary.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

import jaxpar
from models.layers import Projection, RMSNorm, RopeScaling, normed, residual, rope_frequencies, rotate

_embedding = nnx.initializers.normal(stddev=0.02)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. `head_dim` is free of `embed_dim / num_heads`; each kv head serves equally many heads."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise jaxpar.ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"each kv head serves equally many query heads"
            )
        if self.head_dim % 2:
            raise jaxpar.ConfigError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs of features")

    def build(self, rngs: nnx.Rngs) -> "Llama":
        return Llama(self, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = config
        embed, heads = {"embed": c.embed_dim}, {"heads": c.num_heads, "head_dim": c.head_dim}
        kv_heads = {"kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        self.q = Projection(embed, heads, bias=c.attention_bias, rngs=rngs)
        self.k = Projection(embed, kv_heads, bias=c.attention_bias, rngs=rngs)
        self.v = Projection(embed, kv_heads, bias=c.attention_bias, rngs=rngs)
        self.out = Projection(heads, embed, bias=c.attention_bias, rngs=rngs)
        self.q_norm, self.k_norm = (
            RMSNorm(c.head_dim, name="head_dim", epsilon=c.norm_epsilon, rngs=rngs) if c.qk_norm else None
            for _ in range(2)
        )
        self.frequencies = nnx.static(tuple(rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).tolist()))

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        q_BTHh = ctx.constrain(self.q(x_BTD), None, None, "heads", None)
        k_BTKh, v_BTKh = (ctx.constrain(f(x_BTD), None, None, "kv_heads", None) for f in (self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHh, k_BTKh = self.q_norm(q_BTHh), self.k_norm(k_BTKh)
        assert ctx.positions is not None
        frequencies = np.asarray(self.frequencies, np.float32)
        q_BTHh, k_BTKh = (rotate(a, ctx.positions, frequencies) for a in (q_BTHh, k_BTKh))
        return self.out(ctx.constrain(ctx.attend(q_BTHh, k_BTKh, v_BTKh), None, None, "heads", None))


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        embed, mlp = {"embed": config.embed_dim}, {"mlp": config.mlp_dim}
        self.gate = Projection(embed, mlp, bias=config.mlp_bias, rngs=rngs)
        self.up = Projection(embed, mlp, bias=config.mlp_bias, rngs=rngs)
        self.down = Projection(mlp, embed, bias=config.mlp_bias, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        # Rows and positions as one dim: XLA for CPU is slow at the gradients of matrix products over two.
        # Positions that are split stay a dim of their own, or XLA would gather them.
        x = x_BTD if ctx.splits_positions else x_BTD.reshape(-1, x_BTD.shape[-1])
        hidden = nnx.silu(self.gate(x)) * self.up(x)
        hidden = jaxpar.save(ctx.constrain(hidden, *(None,) * (x.ndim - 1), "mlp"), "mlp")
        return self.down(hidden).reshape(x_BTD.shape)


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        x_BTD = residual(x_BTD + residual(self.attention(normed(self.attention_norm, x_BTD, ctx), ctx), ctx), ctx)
        x_BTD = jaxpar.save(x_BTD, "out")
        return residual(x_BTD + residual(self.mlp(normed(self.mlp_norm, x_BTD, ctx), ctx), ctx), ctx)


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        table = jaxpar.named(_embedding, "vocab", "embed")
        shape = (config.vocab_size, config.embed_dim)
        self.embedding = nnx.Param(table(rngs.params(), shape, jnp.float32))
        self.blocks = jaxpar.stack(Block, config.num_layers, config, rngs=rngs)
        self.norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        # The vocabulary comes first, as in the embedding that it may be tied to.
        self.unembedding = None if config.tie_embeddings else nnx.Param(table(rngs.params(), shape, jnp.float32))

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        return residual(jaxpar.embedding_lookup(self.embedding[...], batch["tokens"]), ctx)

    def head(self, x_BTD: Float[Array, "b t d"], batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        x_BTD = normed(self.norm, x_BTD, ctx)
        total = jaxpar.cross_entropy(x_BTD, self.table_VD, batch["targets"], batch["weights"])
        return {"cross_entropy": total}

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        return {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"]))}

    @property
    def table_VD(self) -> Float[Array, "v d"]:
        return (self.embedding if self.unembedding is None else self.unembedding)[...]

    def logits(self, tokens: Int[Array, "b t"], ctx: jaxpar.Context) -> Float[Array, "b t v"]:
        """Float32 scores of every next token, on one device."""
        x_BTD = self.norm(self.blocks(self.embed({"tokens": tokens}, ctx), ctx))
        return jnp.einsum("btd,vd->btv", x_BTD, self.table_VD, preferred_element_type=jnp.float32)
