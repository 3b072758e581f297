"""Memory by kind: sizes that can be worked out by hand."""

import optax
import pytest

import jaxpar
from models.llama import LlamaConfig

CONFIG = LlamaConfig(64, 2, 32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)
LAYER = 2 * 32 * 8 * 4 + 2 * 32 * 4 * 4 + 3 * 32 * 64 + 2 * 32
PARAMETERS = 4 * (2 * LAYER + 2 * 64 * 32 + 32)


@pytest.mark.parametrize(("zero", "parts"), [(0, (1, 1, 1)), (1, (1, 8, 1)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_each_kind_is_as_large_as_zero_leaves_it(zero, parts):
    """Otherwise the report would tell a person to save where nothing is to be saved."""
    program = jaxpar.Program(CONFIG.build, optax.adam(0.1), jaxpar.Plan("data=8", zero=zero, microbatches=2))
    found = program.compile("1x8xcpu", jaxpar.token_shapes(16, 16))
    assert found.memory is not None
    parameters, optimizer, gradients = (PARAMETERS // part for part in parts)
    assert found.memory.parameters == parameters
    assert 0 <= found.memory.optimizer - 2 * optimizer <= 64  # and the count of steps
    assert found.memory.gradients == gradients
    assert found.memory.activations + found.memory.gradients == found.temp_bytes
