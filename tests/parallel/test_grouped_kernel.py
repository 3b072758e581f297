"""The kernels for Hopper give what the plain loop gives, run by Pallas's interpreter on this machine.

Letters: S rows of all tiles, T rows of a tile, E groups, D and F features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxpar
from jaxpar.parallel import grouped_kernel
from jaxpar.parallel.expert import Route
from jaxpar.parallel.grouped import grouped_matmul
from models.moe import MoEConfig, gated


@pytest.fixture
def interpreted(monkeypatch):
    """Three multiprocessors, so that each walks over several blocks, and a race between them is an error."""
    monkeypatch.setattr(grouped_kernel, "_MULTIPROCESSORS", 3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def equal_but_for_rounding(found, wanted):
    """Both sum in float32, in another order, and round once: to one unit of bfloat16's 8 bits."""
    for name, a, b in zip(("y", "dx", "dkernel"), found, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5 * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize(
    ("groups", "tile", "features"),
    [([0, 0, 2, 2, 2, 2, 2, 3], 64, (128, 192)), ([1, 1, 2], 128, (64, 128))],
    ids=["one group empty, one of a tile", "first and last group empty"],
)
def test_kernels_equal_the_loop_forward_and_backward(groups, tile, features, interpreted):
    """Otherwise rows meet another expert's kernel, or the gradient of an expert without rows is what memory held."""
    D, F = features
    group, kernel = jnp.array(groups, jnp.int32), normal(1, 4, D, F)
    x, dy = normal(2, len(groups) * tile, D), normal(3, len(groups) * tile, F)

    def all_three(pallas: bool):
        y, vjp = jax.vjp(lambda x, k: grouped_matmul(x, k, group, pallas), x, kernel)
        return y, *vjp(dy)

    found = all_three(True)
    equal_but_for_rounding(found, all_three(False))
    empty = [e for e in range(4) if e not in groups]
    assert empty and not np.any(found[2][jnp.array(empty)])


def test_a_layer_by_kernels_is_the_layer_by_the_loop(interpreted):
    """Otherwise rows do not lie in tiles that the kernels take. Expert 2 gets no token, and some pairs have none."""
    x, weight = normal(4, 96, 64), jax.random.uniform(jax.random.key(5), (96, 2))
    expert = jnp.array([0, 1, 3, 4])[jax.random.randint(jax.random.key(6), (96, 2), 0, 4)]
    kernels = normal(7, 4, 64, 64) / 8, normal(8, 4, 64, 64) / 8, normal(9, 4, 64, 64) / 8
    by_loop, by_kernel = (Route(None, pallas)(x, expert, weight, gated, kernels, [None] * 3, 1)[0] for pallas in (0, 1))
    a, b = (np.asarray(y, np.float32) for y in (by_kernel, by_loop))
    # Two roundings to bfloat16 lie between kernels.
    np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-7 * np.abs(b).max())


def test_what_the_kernels_cannot_multiply_is_refused():
    """Otherwise Pallas fails in its own words, or features beyond the last whole block are never written."""
    group = jnp.zeros(1, jnp.int32)
    with pytest.raises(jaxpar.PlanError, match=r"multiplies bfloat16, found rows of float32.*set precision='bfloat16'"):
        grouped_matmul(jnp.ones((64, 64)), jnp.ones((2, 64, 64)), group, pallas=True)
    with pytest.raises(jaxpar.PlanError, match=r"multiples of 64 .* \(2, 64, 96\): change .* expert_kernel='loop'"):
        grouped_matmul(normal(0, 64, 64), normal(1, 2, 64, 96), group, pallas=True)


def test_a_plan_with_kernels_is_refused_in_float32_and_on_cpu():
    """Otherwise a run starts, and ends in an error of the compiler's."""
    with pytest.raises(jaxpar.PlanError, match="expert_kernel='pallas' multiplies bfloat16"):
        jaxpar.Plan(experts=jaxpar.Dropless(kernel="pallas"))
    plan = jaxpar.Plan("data=1", precision="bfloat16", experts=jaxpar.Dropless(kernel="pallas"))
    assert plan.experts == "dropless" and jaxpar.Plan.from_dict(plan.to_dict()) == plan
    program = jaxpar.Program(MoEConfig(64, 1, 64, 8, 4, 8, 128).build, optax.sgd(0.1), plan)
    with pytest.raises(jaxpar.PlanError, match=r"needs Hopper GPUs .* found cpu: set expert_kernel='loop'"):
        program.on(jax.devices()[:1])
