"""Model FLOPs by formula, and the peak that they are set against."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxpar.structure import ParamInfo, StackInfo, Structure, inspect_model
from jaxpar.training.flops import model_flops_per_token, peak_flops
from models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab_size=50, num_layers=3, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=16)
LAYER = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16  # q, k and v, out; gate, up, down


@pytest.mark.parametrize("changed", [{}, {"tie_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_flops_count_each_matrix_and_one_table_and_half_of_the_scores(changed):
    """Otherwise MFU could not be compared with anybody else's."""
    structure = inspect_model(replace(CONFIG, **changed).build)
    weights = 3 * LAYER + 50 * 8
    # A token sees T/2 others on average: two products of 24 features, twice that backward, 2 FLOPs each.
    attention = 3 * (128 / 2) * 24 * 2 * 2 * 3
    assert model_flops_per_token(structure, 128) == 6 * weights + attention


def expert_structure():
    info = ParamInfo("moe.up", (2, 8, 4, 6), jnp.float32, ("experts", "embed", "mlp"), "moe")
    return Structure(None, (StackInfo("moe", 2, None),), {"moe.up": info})


def test_only_the_experts_that_a_token_visits_count():
    """Otherwise a mixture of experts would seem to reach several times its speed."""
    assert model_flops_per_token(expert_structure(), 16, experts_per_token=2) == 6 * 2 * 2 * 4 * 6
    assert model_flops_per_token(expert_structure(), 16) is None


def test_a_device_without_a_known_peak_has_none():
    """Otherwise a simulated device would show the MFU of an imagined one."""
    assert peak_flops("cpu", jnp.dtype("float32")) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", jnp.dtype("bfloat16")) == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", jnp.dtype("float32")) == 66.9e12
