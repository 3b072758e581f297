"""A model that trains in milliseconds, with rows that resume."""

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.data.iterator import RowIterator
from jaxpar.data.packing import pack
from models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab_size=31, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
ROWS, LENGTH = 8, 12


def make_run(mesh="data=2", zero=1, optimizer=None):
    program = jaxpar.Program(CONFIG.build, optimizer or optax.adamw(1e-2), jaxpar.Plan(mesh=mesh, zero=zero))
    return program.on(jax.devices()[: program.plan.shape.fixed_size()])


def make_data():
    rng = np.random.default_rng(0)
    rows = pack([rng.integers(0, 31, 40) for _ in range(20)], LENGTH)
    return RowIterator(rows, batch_rows=ROWS, local=slice(0, ROWS), seed=5)
