"""What looks at whole arrays sees each layer of a stack by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.structure import ParamInfo
from jaxpar.training.per_layer import per_layer

LAYERS = 5
PARAMS = {
    "embedding": ParamInfo("embedding", (9, 6), jnp.float32, ("vocab", "embed"), None),
    "blocks.kernel": ParamInfo("blocks.kernel", (LAYERS, 6, 7), jnp.float32, ("embed", "mlp"), "blocks"),
    "blocks.scale": ParamInfo("blocks.scale", (LAYERS, 6), jnp.float32, ("embed",), "blocks"),
}


def drawn(seed: int):
    """With the first layers' gradients far larger than the last ones'."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** np.arange(LAYERS)[::-1]
    found = {p: rng.normal(size=i.shape).astype(np.float32) for p, i in PARAMS.items()}
    for path in ("blocks.kernel", "blocks.scale"):
        found[path] = (found[path] * size.reshape(-1, *[1] * (found[path].ndim - 1))).astype(np.float32)
    return found


def stacked(tree, stages: int):
    return {p: x if PARAMS[p].stack is None else x.reshape(1, stages, -1, *x.shape[1:]) for p, x in tree.items()}


def apart(tree):
    return {
        f"{path}/{i}": layer
        for path, x in tree.items()
        for i, layer in enumerate([x] if PARAMS[path].stack is None else x.reshape(-1, *PARAMS[path].dims))
    }


def run(optimizer, params, gradients):
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
    return updates, state


@pytest.mark.parametrize("stages", [1, 5])
def test_adafactor_of_a_stack_is_that_of_its_layers(stages):
    """Otherwise a stack is factored over its layers, and one layer's large update clips all others."""
    inner = optax.adafactor(0.1, min_dim_size_to_factor=4)
    gradients = [drawn(seed) for seed in (1, 2)]
    updates, state = run(per_layer(inner, PARAMS), stacked(drawn(0), stages), [stacked(g, stages) for g in gradients])
    want, _ = run(inner, apart(drawn(0)), [apart(g) for g in gradients])
    for path, x in apart(updates).items():
        np.testing.assert_allclose(x, want[path], rtol=1e-5, err_msg=path)
    counters = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert all(leaf.shape == () for leaf in counters)


def test_what_mixes_parameters_is_refused():
    """Otherwise a global norm would become the norm of one layer."""
    with pytest.raises(ValueError, match="out_axes"):
        run(per_layer(mixes(), PARAMS), stacked(drawn(0), 1), [stacked(drawn(1), 1)])


def mixes() -> optax.GradientTransformation:
    """Keeps the norm of all gradients."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda updates, state, params=None: (updates, optax.tree.norm(updates))
    )
