"""Predicted memory against what XLA allocates, and against itself: more sharding never takes more."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar.estimate.liveness import CPU, CUDA, piece
from jaxpar.estimate.step_memory import MemoryModel
from models.llama import LlamaConfig
from models.moe import MoEConfig

SIZES: dict = dict(vocab_size=512, num_layers=4, embed_dim=128, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=352)
LLAMA, MOE = LlamaConfig(**SIZES), MoEConfig(**SIZES, num_experts=4, moe_mlp_dim=128)
SHAPES = jaxpar.token_shapes(16, 256)
KINDS = {
    "replicas": (LLAMA, jaxpar.Plan("data=8", zero=1)),
    "fsdp": (LLAMA, jaxpar.Plan("data=8", zero=3, remat="full", microbatches=2)),
    "tensor": (LLAMA, jaxpar.Plan("data=2,tensor=4", zero=2, sequence_sharded_norms=True)),
    "pipeline": (LLAMA, jaxpar.Plan("data=4,pipe=2", microbatches=4)),
    "sequence": (LLAMA, jaxpar.Plan("data=4,seq=2", remat="dots")),
    "experts": (MOE, jaxpar.Plan("data=4,expert=2", zero=1)),
}
# Large weights, of many more layers than are gathered at a time.
WIDE = LlamaConfig(**(SIZES | {"embed_dim": 1024, "mlp_dim": 2816, "num_layers": 16}))


def program(config, plan):
    return jaxpar.Program(config.build, optax.adamw(1e-3), plan)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_predicted_is_what_xla_allocates(kind):
    """Otherwise a plan is offered that does not fit, or one that fits is not."""
    config, plan = KINDS[kind]
    report = program(config, plan).compile("1x8xcpu", SHAPES)
    assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.15)
    memory = program(config, plan).memory("1x8xcpu", SHAPES)
    assert memory.total == report.predicted_peak_bytes
    # To the byte: what the step is given.
    assert memory.parameters + memory.optimizer + memory.batch == report.argument_bytes


@pytest.mark.parametrize("cluster", ["1x8xcpu", "1x8xh100"])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2", "data=4,pipe=2"])
def test_a_higher_stage_of_zero_takes_no_more(mesh, cluster):
    """Otherwise a planner would be told that sharding what lies between steps costs memory."""
    plans = [jaxpar.Plan(mesh, zero=zero, microbatches=2, remat="full") for zero in (0, 1, 2, 3)]
    found = [program(WIDE, plan).memory(cluster, SHAPES) for plan in plans]
    held = [m.parameters + m.optimizer for m in found]
    assert held == sorted(held, reverse=True) and len(set(held[:2])) == 2
    assert found[0].total > found[1].total > found[2].total > found[3].total


def test_recomputing_more_saves_more():
    """Otherwise remat would not be what is turned to when a step does not fit."""
    saved = [
        program(LLAMA, jaxpar.Plan("data=8", remat=remat)).memory("1x8xcpu", SHAPES).saved
        for remat in ("none", "dots", "full")
    ]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == 3


def test_memory_does_not_grow_with_microbatches_of_one_size():
    """Otherwise gradient accumulation would be thought to cost what it is there to avoid."""
    few, many = (
        program(LLAMA, jaxpar.Plan("data=8", microbatches=m)).memory("1x8xcpu", jaxpar.token_shapes(8 * m, 256))
        for m in (2, 8)
    )
    assert many.total - many.batch == few.total - few.batch


def test_offloaded_state_takes_nothing():
    """Otherwise offloading would never be offered to a model that needs it."""
    plan = jaxpar.Plan("data=8", zero=3)
    there, away = (program(LLAMA, p).memory("1x8xcpu", SHAPES) for p in (plan, replace(plan, offload=("optimizer",))))
    assert away.optimizer < there.optimizer // 20 and away.total < there.total


def test_one_model_serves_many_plans_alike():
    """Otherwise what plans have in common would be kept under too few of the things on which it depends."""
    prog = program(LLAMA, jaxpar.Plan())
    model = MemoryModel(prog.structure, prog.optimizer, prog.batch_axes)
    for _, plan in (case for case in KINDS.values() if case[0] is LLAMA):
        assert model.predict(plan, SHAPES, platform="cpu") == program(LLAMA, plan).memory("1x8xcpu", SHAPES)


def bytes_alive(f, platform, *shapes, dtype=jnp.float32):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return piece(jax.make_jaxpr(f)(*args), [None] * len(args), 1, platform).most


def test_what_is_fused_takes_nothing():
    """Otherwise every intermediate of a norm would be counted, several times what XLA allocates."""
    assert bytes_alive(lambda x: jnp.sum(jnp.exp(x * 2 + 1)), CUDA, (64, 64)) == 4


def test_a_product_is_alive_until_it_was_read():
    """Otherwise a chain of products would be thought to need all of its results at once, or only one."""
    square = 4 * 64 * 64
    assert bytes_alive(lambda x: (x @ x) @ (x @ x @ x), CUDA, (64, 64)) == 3 * square
    assert bytes_alive(lambda x: x @ x @ x @ x @ x, CUDA, (64, 64)) == 2 * square


def test_a_costly_value_read_twice_is_stored_on_cpu():
    """Otherwise the softmax of a head, one of the largest values of a step, would be left out."""

    def softmax(x, y):
        e = jnp.exp(x @ y)
        return jnp.sum(e, axis=1), e @ y

    cpu, cuda = (bytes_alive(softmax, platform, (64, 64), (64, 64)) for platform in (CPU, CUDA))
    assert cpu >= cuda


def test_a_weights_gradient_in_bfloat16_takes_float32_copies_on_cpu():
    """Otherwise the largest values of a layer's backward would be missing; XLA for CPU allocates them."""

    def gradients(x, dy, dz):
        return [jax.lax.dot_general(x, dx, (((0,), (0,)), ((), ()))) for dx in (dy, dz)]

    one = 2 * 64 * 64
    cpu, cuda = (bytes_alive(gradients, p, *3 * [(64, 64)], dtype=jnp.bfloat16) for p in (CPU, CUDA))
    assert cuda == 2 * one
    # A copy of x that both read, and of one other operand at a time.
    assert cpu == 2 * one + 2 * (2 * one)
