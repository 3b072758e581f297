"""A model of two stacks that attends in both, with a window and without, and counts rows beside tokens."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxpar

_kernel = nnx.initializers.lecun_normal()
WIDTH, HEADS, HEAD_DIM = 16, 8, 4


class Attending(nnx.Module):
    """Attention to the last `window` positions, or to all before; the size of what it adds is a term, by rows."""

    def __init__(self, kv_heads: int, window: int | None, *, rngs: nnx.Rngs):
        def project(heads: int, name: str) -> nnx.Param:
            init = jaxpar.named(_kernel, "embed", name, "head_dim")
            return nnx.Param(init(rngs.params(), (WIDTH, heads, HEAD_DIM), jnp.float32))

        self.q, self.k, self.v = project(HEADS, "heads"), project(kv_heads, "kv_heads"), project(kv_heads, "kv_heads")
        out = jaxpar.named(_kernel, "heads", "head_dim", "embed")
        self.out = nnx.Param(out(rngs.params(), (HEADS, HEAD_DIM, WIDTH), jnp.float32))
        self.window = window

    def __call__(self, x_BTD: Array, ctx: jaxpar.Context) -> tuple[Array, dict[str, Array]]:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x_BTD, w[...].astype(x_BTD.dtype)) for w in (self.q, self.k, self.v))
        seen = ctx.attend(q, k, v, window=self.window)
        added = jnp.einsum("bthe,hed->btd", seen, self.out[...].astype(x_BTD.dtype))
        added = jaxpar.save(added, "mlp")
        return x_BTD + added, {"size": jnp.sum(jnp.square(added.astype(jnp.float32)))}


class TwoStacks(nnx.Module):
    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs):
        table = jaxpar.named(_kernel, "vocab", "embed")
        self.table = nnx.Param(table(rngs.params(), (vocab_size, WIDTH), jnp.float32))
        self.near = jaxpar.stack(Attending, 2, 2, 5, rngs=rngs)
        self.far = jaxpar.stack(Attending, 2, 8, None, rngs=rngs)

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Array:
        assert ctx.positions is not None
        phases = ctx.positions[..., None] * jnp.arange(1, WIDTH + 1, dtype=jnp.float32)[None, None] / WIDTH
        return jaxpar.embedding_lookup(self.table[...], batch["tokens"]) + jnp.sin(phases)

    def head(self, x_BTD: Array, batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        total = jaxpar.cross_entropy(x_BTD, self.table[...], batch["targets"], batch["weights"])
        return {"cross_entropy": total}

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        counted = jnp.sum(jnp.max(batch["weights"], axis=1) > 0).astype(jnp.float32)
        return {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"])), "size": jaxpar.Term(counted, coef=0.1)}
