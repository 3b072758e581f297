"""Compiles the train step of a model with Llama 3 405B's shape for 2,048 H100s, on a machine that has none.

    python experiments/compile_405b.py
    python experiments/compile_405b.py --pipeline    # for 16,384 of them, 16 stages

Needs XLA's CUDA compiler and no GPU: `pip install 'jaxpar[aot-gpu]'` (the development set-up has it).
"""

import resource
import sys
from dataclasses import replace

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
PIPELINE = replace(PLAN, mesh="data=-1,pipe=16,tensor=8", zero=1, microbatches=16)
PIPELINE_CLUSTER, PIPELINE_ROWS = "2048x8xh100", 2048


def main() -> None:
    pipeline = "--pipeline" in sys.argv[1:]
    plan, cluster, rows = (PIPELINE, PIPELINE_CLUSTER, PIPELINE_ROWS) if pipeline else (PLAN, CLUSTER, ROWS)
    jaxpar.simulate(1)  # this process itself computes nothing
    program = jaxpar.Program(MODEL.build, optax.adamw(1e-4), plan)
    report = program.compile(cluster, jaxpar.token_shapes(rows, LENGTH))
    print(f"{plan} on {cluster}: {rows} rows of {LENGTH} tokens a step")
    print(report.full_table())
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"\n{used.ru_utime + used.ru_stime:.0f} s of CPU time and {used.ru_maxrss / 2**20:.2f} GiB in all")


if __name__ == "__main__":
    main()
