"""A model of two stacks of different layers, whose layers add up a term of their own: as users bring them."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxpar

_kernel = nnx.initializers.lecun_normal()
AXES: jaxpar.batch.BatchAxes = {"x": ("rows", None), "targets": ("rows",)}
WIDTH = 12


class Dense(nnx.Module):
    """Norm, up and down."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 24, kernel_init=jaxpar.named(_kernel, "embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(24, WIDTH, kernel_init=jaxpar.named(_kernel, "mlp", "embed"), rngs=rngs)

    def __call__(self, x: Array, ctx: jaxpar.Context) -> Array:
        hidden = jaxpar.save(nnx.gelu(self.up(self.norm(x))), "mlp")
        return x + jaxpar.save(self.down(hidden), "attention")


class Balanced(nnx.Module):
    """Two mixed by a gate, whose balance is a term of the objective, additive over rows."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, width, kernel_init=jaxpar.named(_kernel, None, "mlp"), rngs=rngs)
        self.down = nnx.Linear(width, WIDTH, kernel_init=jaxpar.named(_kernel, "mlp", None), rngs=rngs)

    def __call__(self, x: Array, ctx: jaxpar.Context) -> tuple[Array, dict[str, Array]]:
        gate = nnx.softmax(self.gate(x))
        y = x + self.down(jnp.tanh(self.up(x))) * gate[..., :1]
        return y, {"balance": jnp.sum(jnp.square(gate))}


class TwoStacks(nnx.Module):
    """`dense` layers, then `balanced` ones; a table of 7 rows, which are looked up and scored."""

    def __init__(self, dense: int, balanced: int, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jaxpar.named(_kernel, "vocab", "embed")(rngs.params(), (7, WIDTH), jnp.float32))
        self.dense = jaxpar.stack(Dense, dense, rngs=rngs)
        self.balanced = jaxpar.stack(Balanced, balanced, 8, rngs=rngs)

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Array:
        return batch["x"] + jaxpar.embedding_lookup(self.table[...], batch["targets"][:, None])[:, 0]

    def head(self, x: Array, batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        targets = (batch["targets"] + 1) % 7
        weights = jnp.ones(targets.shape, jnp.float32)
        return {
            "cross_entropy": jaxpar.cross_entropy(x[:, None], self.table[...], targets[:, None], weights[:, None]),
            "energy": jnp.sum(x**2),
        }

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        rows = jnp.float32(batch["x"].shape[0])
        coefs = {"cross_entropy": 1.0, "energy": 0.1, "balance": 0.5}
        return {name: jaxpar.Term(rows, coef) for name, coef in coefs.items()}
