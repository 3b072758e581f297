"""One step and one evaluation on meshes of four devices, whose axes lie within processes or across them."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.cli.processes import Processes, join
from jaxpar.mesh import simulate
from models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab_size=31, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=4, head_dim=4, mlp_dim=16)
ROWS, LENGTH = 8, 12

# (mesh, ZeRO stage). Of `tensor=4` each process has one half of every matrix, of `pipe=2` one stage; and all rows.
MESHES = (("data=2,tensor=2", 3), ("tensor=4", 0), ("pipe=2,data=2", 1))


def measure():
    """By mesh: loss and gradient norm of a step, and the evaluation of rows that leave one process without any."""
    return {mesh: _measure(mesh, zero) for mesh, zero in MESHES}


def _measure(mesh, zero):
    program = jaxpar.Program(CONFIG.build, optax.sgd(1e-2), jaxpar.Plan(mesh=mesh, zero=zero, microbatches=2))
    run = program.on(jax.devices()[:4])
    part, parts = run.row_share
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 31, (ROWS + 3, LENGTH)).astype(np.int32)
    weights = rng.integers(0, 2, tokens.shape).astype(np.float32)
    whole = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights}
    state, size = run.init(), ROWS // parts
    mine = slice(part * size, (part + 1) * size)
    batches = [{name: x[first : first + ROWS][mine] for name, x in whole.items()} for first in (0, ROWS)]
    evaluated = run.evaluate(state, batches[1:])
    _, metrics = run.step(state, run.put(batches[0]))
    found = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    return found | {"evaluated": evaluated["loss"], "rows": evaluated["rows"]}


if __name__ == "__main__":
    join(Processes(), heartbeat_timeout=60)
    simulate(int(sys.argv[sys.argv.index("--simulate") + 1]))
    assert jax.process_count() == 2
    Path(f"measured-{jax.process_index()}.json").write_text(json.dumps(measure()))
