"""A Llama and its train step in plain JAX, as one writes them by hand for one mesh: what jaxpar is measured against.

Only the two kernels come from jaxpar, attention and cross-entropy, since kernels are not what is measured.

Letters: L layers, B rows, T positions, D embed, H query heads, K kv heads, h head dim, F mlp, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.attention import blockwise_attention
from jaxpar.parallel.cross_entropy import cross_entropy

Params = dict[str, Array]

HEADS = P("data", None, "tensor", None)
OUTER = {"embedding": P("tensor", None), "norm": P(None), "unembedding": P("tensor", None)}
LAYERS = {
    "attention_norm": P(None, None),  # LD
    "q": P(None, None, "tensor", None),  # LDHh
    "k": P(None, None, "tensor", None),  # LDKh
    "v": P(None, None, "tensor", None),
    "out": P(None, "tensor", None, None),  # LHhD
    "mlp_norm": P(None, None),
    "gate": P(None, None, "tensor"),  # LDF
    "up": P(None, None, "tensor"),
    "down": P(None, "tensor", None),  # LFD
}
THETA, EPSILON = 10000.0, 1e-5
POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


def rms_norm(x_BTD: Array, scale_D: Array) -> Array:
    x32 = x_BTD.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)
    return (x32 * inverse * scale_D[None, None]).astype(x_BTD.dtype)


def rotate(x_BTHh: Array) -> Array:
    half = x_BTHh.shape[-1] // 2
    frequencies = (THETA ** -(np.arange(half) / half)).astype(np.float32)
    angles = jnp.arange(x_BTHh.shape[1], dtype=jnp.float32)[None, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_BTHh, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def loss(params: Params, batch: dict[str, Array], mesh: Mesh, remat: str) -> Array:
    """Mean cross-entropy over the tokens that count."""

    def constrain(x: Array, spec: P) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def attend(q: Array, k: Array, v: Array) -> Array:
        if mesh.size == 1:
            return blockwise_attention(q, k, v)
        return jax.shard_map(blockwise_attention, mesh=mesh, in_specs=(HEADS,) * 3, out_specs=HEADS)(q, k, v)

    def head(x: Array, table: Array, targets: Array, weights: Array) -> Array:
        return lax.psum(cross_entropy(x, lax.pcast(table, "data", to="varying"), targets, weights), "data")

    def layer(x_BTD: Array, w: Params) -> tuple[Array, None]:
        y = rms_norm(x_BTD, w["attention_norm"])
        q, k, v = (constrain(jnp.einsum("btd,dnh->btnh", y, w[n]), HEADS) for n in ("q", "k", "v"))
        y = constrain(attend(rotate(q), rotate(k), v), HEADS)
        x_BTD = constrain(x_BTD + jnp.einsum("btnh,nhd->btd", y, w["out"]), P("data", None, None))
        y = rms_norm(x_BTD, w["mlp_norm"])
        y = constrain(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), P("data", None, "tensor"))
        return constrain(x_BTD + y @ w["down"], P("data", None, None)), None

    if remat != "none":
        layer = jax.checkpoint(layer, policy=POLICIES[remat])
    x = constrain(jnp.take(params["embedding"], batch["tokens"], axis=0), P("data", None, None))
    x, _ = lax.scan(layer, x, {name: params[name] for name in LAYERS})
    x = rms_norm(x, params["norm"])
    if mesh.size == 1:
        total = cross_entropy(x, params["unembedding"], batch["targets"], batch["weights"])
    else:
        rows = P("data")
        sharded = jax.shard_map(head, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=P(), axis_names={"data"})
        total = sharded(x, params["unembedding"], batch["targets"], batch["weights"])
    return total / jnp.sum(batch["weights"])


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, spec) for name, spec in (OUTER | LAYERS).items()}


def gradients(params: Params, batch: dict[str, Array], mesh: Mesh, remat: str) -> tuple[Array, Params]:
    return jax.value_and_grad(loss)(params, batch, mesh, remat)


def make_step(optimizer: optax.GradientTransformation, mesh: Mesh, remat: str = "none") -> Any:
    """-> jitted `(params, opt_state, batch) -> (params, opt_state, loss, grad_norm)`, which donates its state."""

    def step(params: Params, opt_state: Any, batch: dict[str, Array]) -> Any:
        value, grads = gradients(params, batch, mesh, remat)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(grads)

    return jax.jit(step, donate_argnums=(0, 1))
