"""Compiles the train step of a model with Llama 3 405B's shape for 2,048 H100s, on a machine that has none.

    python experiments/compile_405b.py

Needs XLA's CUDA compiler and no GPU: `pip install 'jaxpar[aot-gpu]'` (the development set-up has it).
"""

import optax

import jaxpar
from models.layers import RopeScaling
from models.llama import LlamaConfig

MODEL = LlamaConfig(
    vocab_size=128256,
    num_layers=126,
    embed_dim=16384,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=53248,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(),
)
PLAN = jaxpar.Plan("data=-1,tensor=8", zero=3, sequence_sharded_norms=True, precision="bfloat16", remat="full")
CLUSTER, ROWS, LENGTH = "256x8xh100", 256, 8192


def main() -> None:
    jaxpar.simulate(1)  # this process itself computes nothing
    program = jaxpar.Program(MODEL.build, optax.adamw(1e-4), PLAN)
    report = program.compile(CLUSTER, jaxpar.token_shapes(ROWS, LENGTH))
    print(f"{PLAN} on {CLUSTER}: {ROWS} rows of {LENGTH} tokens a step")
    print(report.table())


if __name__ == "__main__":
    main()
