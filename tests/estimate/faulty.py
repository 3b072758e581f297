"""A small Llama with one fault at a time: what a user may forget, and XLA then does in silence."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

import jaxpar
from models.layers import normed, residual
from models.llama import MLP, Block, Llama, LlamaConfig

CONFIG = LlamaConfig(64, 3, 32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)


class GatheringMLP(MLP):
    """Gathers its weights in every layer of every microbatch, and works with them whole."""

    def __call__(self, x_BTD: Array, ctx: jaxpar.Context) -> Array:
        gate, up, down = (
            jax.lax.with_sharding_constraint(layer.kernel[...], P(None, None))
            for layer in (self.gate, self.up, self.down)
        )
        return (nnx.silu(x_BTD @ gate) * (x_BTD @ up)) @ down  # gathered weights


class UnconstrainedMLP(MLP):
    """Does not say how its hidden activations lie."""

    def __call__(self, x_BTD: Array, ctx: jaxpar.Context) -> Array:
        hidden = nnx.silu(self.gate(x_BTD)) * self.up(x_BTD)  # missing constraint
        return self.down(hidden)


class FaultyBlock(Block):
    def __init__(self, config: LlamaConfig, mlp: type[MLP], *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.mlp = mlp(config, rngs=rngs)


class UnnormedBlock(Block):
    """Gives its matmuls positions that are still split."""

    def __call__(self, x_BTD: Array, ctx: jaxpar.Context) -> Array:
        x_BTD = residual(x_BTD + residual(self.attention(normed(self.attention_norm, x_BTD, ctx), ctx), ctx), ctx)
        return residual(x_BTD + residual(self.mlp(self.mlp_norm(x_BTD), ctx), ctx), ctx)  # norm not constrained


class Faulty(Llama):
    def __init__(self, block: type[nnx.Module], *arguments, rngs: nnx.Rngs):
        super().__init__(CONFIG, rngs=rngs)
        self.blocks = jaxpar.stack(block, CONFIG.num_layers, CONFIG, *arguments, rngs=rngs)


class ReplicatedEmbedding(Llama):
    """Its table has no names, so that every device of `tensor` holds all of it."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(CONFIG, rngs=rngs)
        table = nnx.initializers.normal()(rngs.params(), (CONFIG.vocab_size, CONFIG.embed_dim), jnp.float32)
        self.embedding = nnx.Param(table)

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Array:
        return residual(self.embedding[...][batch["tokens"]], ctx)  # lookup of the replicated table


class GatheredEmbedding(Llama):
    """Looks up a table that is split by rows as if it were whole."""

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Array:
        return residual(self.embedding[...][batch["tokens"]], ctx)  # lookup of a split table


gathering = partial(Faulty, FaultyBlock, GatheringMLP)
unconstrained = partial(Faulty, FaultyBlock, UnconstrainedMLP)
unnormed = partial(Faulty, UnnormedBlock)
gathered_embedding = partial(GatheredEmbedding, CONFIG)
