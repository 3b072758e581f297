"""Muon on stacked, sharded layers is optax's Muon on each layer's matrices."""

import jax
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxpar import Plan, Program
from jaxpar.structure import inspect_model
from jaxpar.testing import run_on_enough_devices
from jaxpar.training.muon import muon, muon_weight_dimension_numbers
from models.llama import LlamaConfig
from tests.training.updates import Logical, assert_equal, drawn, trajectory

CONFIG = LlamaConfig(
    vocab_size=31, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=2, mlp_dim=24, attention_bias=True
)
PARAMS = inspect_model(CONFIG.build).params
INPUTS = {"out": 2}  # how many of the first dims of a kernel are inputs; 1 where nothing else is said
START, GRADIENTS = drawn(PARAMS, 0), [drawn(PARAMS, seed) for seed in (1, 2, 3)]


def unstacked(flat: Logical) -> Logical:
    """Logical parameters -> one 2-D matrix for each layer's kernel, one array for each layer's bias or scale."""
    found = {}
    for path, x in flat.items():
        layers = {f"{path}/{i}": layer for i, layer in enumerate(x)} if path.startswith("blocks.") else {path: x}
        if path.endswith("kernel"):
            rows = int(np.prod(x.shape[1 : 1 + INPUTS.get(path.split(".")[-2], 1)]))
            layers = {name: layer.reshape(rows, -1) for name, layer in layers.items()}
        found |= layers
    return found


def optax_muon() -> optax.GradientTransformation:
    """For kernels; Adam for the rest, where optax's own choice would be Nesterov's."""

    def labels(tree):
        return {path: "muon" if ".kernel/" in path else "adam" for path in tree}

    matrices = optax.contrib.muon(0.1, consistent_rms=0.2)
    return optax.partition({"muon": matrices, "adam": optax.adam(0.1, b2=0.95)}, labels)


@pytest.fixture(scope="module")
def expected():
    optimizer = optax_muon()
    with jax.enable_x64(True):
        params = unstacked(START)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for grads in GRADIENTS:
            updates, state = update(unstacked(grads), state, params)
            params = {path: x + updates[path] for path, x in params.items()}
        return jax.device_get(params)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_muon_of_stacked_sharded_layers_is_that_of_each_matrix(zero, expected):
    """Otherwise the layers of a stack are one matrix to Muon, or heads rows of another."""
    optimizer = optax.chain(muon(PARAMS, 0.9, 0.95), optax.scale(-0.1))
    run = run_on_enough_devices(Program(CONFIG.build, optimizer, Plan("data=2,tensor=2", zero=zero)))
    assert_equal(unstacked(trajectory(run, START, GRADIENTS)[-1]), expected, 1e-10)


def test_muon_of_layers_on_uneven_stages_is_that_of_each_matrix(expected):
    """Otherwise a place without a layer is a matrix to Muon: nothing divided by nothing."""
    optimizer = optax.chain(muon(PARAMS, 0.9, 0.95), optax.scale(-0.1))
    run = run_on_enough_devices(Program(CONFIG.build, optimizer, Plan("data=2,pipe=2", zero=3)))
    assert_equal(unstacked(trajectory(run, START, GRADIENTS)[-1]), expected, 1e-10)


def test_dimension_numbers_follow_names_and_leave_tables_scales_and_biases_to_adam():
    """Otherwise an embedding is orthogonalised, or a bias over heads taken for a matrix."""
    numbers = muon_weight_dimension_numbers(PARAMS)
    assert numbers["blocks.attention.q.kernel"] == MuonDimensionNumbers((-3,), (-2, -1))
    assert numbers["blocks.attention.out.kernel"] == MuonDimensionNumbers((-3, -2), (-1,))
    assert numbers["blocks.mlp.down.kernel"] == MuonDimensionNumbers((-2,), (-1,))
    assert {path for path, n in numbers.items() if n is None} == {p for p in numbers if not p.endswith("kernel")}
