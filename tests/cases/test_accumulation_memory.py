"""Accumulation saves memory, and sharded gradients are sharded."""

from dataclasses import replace
from math import prod

import optax

from experiments.parity_table import TOY
from jaxpar import Plan, Program, token_shapes
from jaxpar.testing import run_on_enough_devices

HEAVY = replace(TOY, num_layers=4, embed_dim=64)


# Almost all parameters lie in the layers' matrices: 4 x 3 x 64 x 1024 float32 are 3 MiB.
WIDE = replace(HEAVY, mlp_dim=1024)


def memory(config, mesh: str, shapes, **options):
    run = run_on_enough_devices(Program(config.build, optax.sgd(0.1), Plan(mesh, **options)))
    return run, run.lower(shapes).compile().memory_analysis()


def test_eight_microbatches_need_a_third_of_the_memory_of_one():
    """Otherwise accumulation is a loop that keeps every microbatch's activations alive; measured: 0.18."""
    shapes = token_shapes(rows=64, length=128)
    one, eight = (memory(HEAVY, "data=1", shapes, microbatches=m)[1].temp_size_in_bytes for m in (1, 8))
    assert eight < 0.35 * one, (eight, one)


def test_gradients_are_accumulated_in_an_eighth_on_each_of_eight_devices():
    """Otherwise ZeRO 2 shards gradients only after the whole of them has stood on every device."""
    shapes = token_shapes(rows=16, length=8)
    _, whole = memory(WIDE, "data=8", shapes, microbatches=2, zero=0)
    run, sharded = memory(WIDE, "data=8", shapes, microbatches=2, zero=2)
    total = sum(4 * prod(p.storage_shape) for p in run.placements.values())
    assert whole.temp_size_in_bytes - sharded.temp_size_in_bytes > 0.75 * total
    shards = [s.shard_shape(run.placements[path].storage_shape) for path, s in run.layout.update_shardings().items()]
    assert 8 * sum(4 * prod(shard) for shard in shards) == total
