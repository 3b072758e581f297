"""A GPT-2-style decoder: layer norm, learned positions, GELU, biases, dropout, tied embeddings. Single-device code.

Letters: B rows, T positions, D embed, H heads, h head dim, F mlp, V vocabulary, P learned positions.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

import jaxpar
from models.layers import LayerNorm, Projection, normed, residual

_embedding = nnx.initializers.normal(stddev=0.02)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model, and what keeps it from fitting its data too well.

    Attributes:
      num_positions: how long a document may be: each position has a learned vector.
      dropout: the share of activations that training leaves out, after the embedding and each branch of a layer.
      label_smoothing: the share of each target that training spreads evenly over the vocabulary.
      z_loss_coef: how much the square of log sum exp counts, a second term of the objective; 0: it is not computed.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    num_positions: int
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss_coef: float = 0.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise jaxpar.ConfigError(
                f"embed_dim={self.embed_dim} does not divide into num_heads={self.num_heads}; give a multiple"
            )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise jaxpar.ConfigError(f"{name}={getattr(self, name)}: needs a share from 0 to below 1")

    def build(self, rngs: nnx.Rngs) -> "GPT":
        return GPT(self, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, embed_dim: int, num_heads: int, *, causal: bool, rngs: nnx.Rngs):
        embed, heads = {"embed": embed_dim}, {"heads": num_heads, "head_dim": embed_dim // num_heads}
        self.q, self.k, self.v = (Projection(embed, heads, bias=True, rngs=rngs) for _ in range(3))
        self.out = Projection(heads, embed, bias=True, rngs=rngs)
        self.causal = causal

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        q_BTHh, k_BTHh, v_BTHh = (ctx.constrain(f(x_BTD), None, None, "heads", None) for f in (self.q, self.k, self.v))
        out_BTHh = ctx.attend(q_BTHh, k_BTHh, v_BTHh, causal=self.causal)
        return self.out(ctx.constrain(out_BTHh, None, None, "heads", None))


class MLP(nnx.Module):
    def __init__(self, embed_dim: int, mlp_dim: int, *, rngs: nnx.Rngs):
        embed, mlp = {"embed": embed_dim}, {"mlp": mlp_dim}
        self.up = Projection(embed, mlp, bias=True, rngs=rngs)
        self.down = Projection(mlp, embed, bias=True, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        return self.down(ctx.constrain(nnx.gelu(self.up(x_BTD)), None, None, "mlp"))


class Block(nnx.Module):
    """Norms before each branch, dropout after it (Radford et al., 2019); `causal=False` for encoders."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int,
        *,
        dropout: float,
        epsilon: float,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = LayerNorm(embed_dim, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(embed_dim, num_heads, causal=causal, rngs=rngs)
        self.mlp_norm = LayerNorm(embed_dim, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(embed_dim, mlp_dim, rngs=rngs)
        self.dropout = dropout

    def __call__(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        for norm, branch in ((self.attention_norm, self.attention), (self.mlp_norm, self.mlp)):
            out_BTD = residual(branch(normed(norm, x_BTD, ctx), ctx), ctx)
            x_BTD = jaxpar.save(residual(x_BTD + ctx.dropout(out_BTD, self.dropout), ctx), "out")
        return x_BTD


class GPT(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        tokens, positions = (jaxpar.named(_embedding, name, "embed") for name in ("vocab", "positions"))
        self.embedding = nnx.Param(tokens(rngs.params(), (c.vocab_size, c.embed_dim), jnp.float32))
        self.positions = nnx.Param(positions(rngs.params(), (c.num_positions, c.embed_dim), jnp.float32))
        sizes = (c.embed_dim, c.num_heads, c.mlp_dim)
        self.blocks = jaxpar.stack(Block, c.num_layers, *sizes, dropout=c.dropout, epsilon=c.norm_epsilon, rngs=rngs)
        self.norm = LayerNorm(c.embed_dim, epsilon=c.norm_epsilon, rngs=rngs)
        self.config = c

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        assert ctx.positions is not None
        longest, length = self.config.num_positions, ctx.positions.shape[1] * ctx.row_parts
        if length > longest:
            raise jaxpar.ModelError(
                f"rows have {length} positions, the model has learned ones for num_positions={longest}; "
                f"make rows shorter or num_positions larger"
            )
        # A position past the last one gives NaN: rather a step that is skipped than a wrong vector in silence.
        positions_BTD = self.positions[...].at[ctx.positions].get(mode="fill")
        x_BTD = jaxpar.embedding_lookup(self.embedding[...], batch["tokens"]) + positions_BTD
        return residual(ctx.dropout(x_BTD, self.config.dropout), ctx)

    def head(self, x_BTD: Float[Array, "b t d"], batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        smoothing = self.config.label_smoothing if ctx.train else 0.0
        args = (normed(self.norm, x_BTD, ctx), self.embedding[...], batch["targets"], batch["weights"])
        if self.config.z_loss_coef == 0.0:
            return {"cross_entropy": jaxpar.cross_entropy(*args, label_smoothing=smoothing)}
        total, z_loss = jaxpar.cross_entropy_and_z_loss(*args, label_smoothing=smoothing)
        return {"cross_entropy": total, "z_loss": z_loss}

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        term = partial(jaxpar.Term, jnp.sum(batch["weights"]))
        coef = self.config.z_loss_coef
        return {"cross_entropy": term()} | ({"z_loss": term(coef=coef)} if coef else {})

    def logits(self, tokens: Int[Array, "b t"], ctx: jaxpar.Context) -> Float[Array, "b t v"]:
        """Float32 scores of every next token, on one device."""
        x_BTD = self.norm(self.blocks(self.embed({"tokens": tokens}, ctx), ctx))
        return jnp.einsum("btd,vd->btv", x_BTD, self.embedding[...], preferred_element_type=jnp.float32)
