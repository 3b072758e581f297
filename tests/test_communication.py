"""The communication in the compiled step is what the plan promises, and no more: kinds, executions and bytes by axis.

Letters: L layers, m microbatches, A bytes of one microbatch's activations on one device.
"""

import jax
import optax
import pytest

import jaxpar
from jaxpar.estimate.compile import StepReport, report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import topology_devices
from jaxpar.placement import Placement
from jaxpar.program import Shapes
from jaxpar.run import Run
from models.llama import LlamaConfig

ROWS, LENGTH, LAYERS, EMBED = 32, 16, 3, 32
CONFIG = LlamaConfig(64, LAYERS, EMBED, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64)
FLOAT = 4
PLANS = [
    jaxpar.Plan(f"data={8 // tensor},tensor={tensor}", zero=zero, microbatches=1 + zero % 2)
    for zero in (0, 1, 2, 3)
    for tensor in (1, 2, 4)
]


def compiled(plan: jaxpar.Plan, cluster: str) -> tuple[Run, StepReport]:
    return compiled_for(plan, cluster, jaxpar.token_shapes(ROWS, LENGTH))


def compiled_for(plan: jaxpar.Plan, cluster: str, shapes: Shapes) -> tuple[Run, StepReport]:
    run = jaxpar.Program(CONFIG.build, optax.sgd(0.1), plan).on(topology_devices(Cluster.parse(cluster)))
    return run, report(run.lower(shapes), run.mesh)


def leaf_bytes(placement: Placement, tensor: int) -> int:
    """One device's tensor shard of a parameter, whole over `data`; of one layer, if it is a stack's."""
    size = FLOAT
    for dim, axis in zip(placement.padded, placement.tensor_spec, strict=True):
        size *= dim // tensor if axis == "tensor" else dim
    return size


def data_bytes(run: Run) -> dict[str, int]:
    """Bytes over `data` and `seq` that hold parameters or their gradients, by kind."""
    plan, tensor = run.plan, run.plan.shape.tensor
    layer = sum(leaf_bytes(p, tensor) for p in run.placements.values() if p.info.stack)
    outer = sum(leaf_bytes(p, tensor) for p in run.placements.values() if not p.info.stack)
    layers, m = CONFIG.num_layers, plan.microbatches
    all_of_it = layers * layer + outer
    # Weights are fetched a layer ahead: the first comes before the loop. Gradients return a layer behind, so that the
    # first to return is one of zeros.
    scattered = (layers * m + 1) * layer + m * outer
    return {
        0: {"all-reduce": all_of_it},
        1: {"reduce-scatter": all_of_it, "all-gather": all_of_it},
        2: {"reduce-scatter": scattered, "all-gather": all_of_it},
        3: {"reduce-scatter": scattered, "all-gather": (2 * layers * m + 1) * layer + outer},
    }[plan.zero]


def found_bytes(step: StepReport, axis: str, least: int = 64) -> dict[str, int]:
    """By kind, leaving out collectives of fewer than `least` bytes: term weights, the loss, the gradient norm."""
    found: dict[str, int] = {}
    for c in step.collectives:
        if axis in c.axes and c.bytes >= least:
            found[c.kind] = found.get(c.kind, 0) + c.executions * c.bytes
    return found


def small_bytes(step: StepReport) -> int:
    return sum(c.executions * c.bytes for c in step.collectives if c.bytes < 64)


# Of those, what is compiled for GPUs as well, which takes three times as long: every stage of ZeRO, every size.
FOR_GPUS = [PLANS[i] for i in (0, 4, 8, 9, 11)]


@pytest.mark.parametrize(
    ("plan", "cluster"),
    [*((plan, "1x8xcpu") for plan in PLANS), *((plan, "1x8xh100") for plan in FOR_GPUS)],
    ids=str,
)
def test_collectives_equal_the_formula(plan, cluster):
    """Otherwise a strategy moves more than it promises, or leaves something unreduced."""
    run, step = compiled(plan, cluster)
    assert_promised(found_bytes(step, "data"), data_bytes(run))
    assert small_bytes(step) < 256
    assert {axis for c in step.collectives for axis in c.axes} <= {"data", "tensor"}

    rows = ROWS // plan.shape.data
    activations = rows // plan.microbatches * LENGTH * EMBED * FLOAT
    # Forward and backward, each half layer sums one activation; the embedding and the head's input sum one each. The
    # head sums three numbers a token: the largest logit, the exponentials, the target's.
    per_token = 3 * rows * LENGTH * FLOAT
    halves = {"1x8xh100": 4, "1x8xcpu": 2 + 3 + 2}[cluster]  # XLA for CPU sums dx of q, k, v apart, and of gate, up
    expected = plan.microbatches * (halves * LAYERS + 2) * activations + per_token
    assert_promised(found_bytes(step, "tensor"), {} if plan.shape.tensor == 1 else {"all-reduce": expected})


def assert_promised(found: dict[str, int], promised: dict[str, int]) -> None:
    """The same bytes of every kind. XLA may merge scalars, the loss or the norm, into a larger all-reduce."""
    merged = found.get("all-reduce", 0) - promised.get("all-reduce", 0)
    assert 0 <= merged <= 2 * FLOAT, (found, promised)
    assert found == promised | ({"all-reduce": promised["all-reduce"] + merged} if merged else {})


@pytest.mark.parametrize(("zero", "tensor"), [(0, 2), (1, 1), (2, 1), (3, 2)])
def test_gradients_reduced_in_bfloat16_move_half_the_bytes(zero, tensor):
    """Otherwise they are rounded and gain nothing. XLA for CPU widens such sums again: the H100 program tells."""
    plan = jaxpar.Plan(f"data={8 // tensor},tensor={tensor}", zero=zero, microbatches=2, reduce_dtype="bfloat16")
    run, step = compiled(plan, "1x8xh100")
    reduces = ("all-reduce", "reduce-scatter")
    promised = {kind: size // 2 if kind in reduces else size for kind, size in data_bytes(run).items()}
    assert_promised(found_bytes(step, "data"), promised)
    assert sum(c.executions for c in step.collectives if c.kind == "all-gather" and "tensor" in c.axes) == 0


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_once_after_the_microbatches(zero):
    """Otherwise accumulation multiplies the communication that it exists to save."""
    _, step = compiled(jaxpar.Plan("data=4,tensor=2", zero=zero, microbatches=4), "1x8xcpu")
    assert [c.kind for c in step.collectives if "data" in c.axes and c.loop_depth] == []


@pytest.mark.parametrize("zero", [0, 3])
def test_no_weight_or_gradient_is_gathered_over_tensor_with_sequence_sharded_norms(zero):
    """Otherwise XLA undoes tensor parallelism in silence: only activations may be gathered, a microbatch at a time."""
    plan = jaxpar.Plan("data=4,tensor=2", zero=zero, sequence_sharded_norms=True)
    _, step = compiled(plan, "1x8xh100")
    activations = ROWS // 4 * LENGTH * EMBED * FLOAT
    gathers = [c for c in step.collectives if c.kind == "all-gather" and "tensor" in c.axes and c.bytes >= activations]
    per_token = ROWS // 4 * LENGTH * FLOAT
    others = [
        c.bytes
        for c in step.collectives
        if c.kind == "all-gather" and "tensor" in c.axes and c.bytes < activations and c.bytes != per_token
    ]
    assert others == []
    assert all(c.bytes % activations in (0, per_token) for c in gathers)
    # A layer has two halves, each with a gather before its matmuls forward and one of its gradient backward.
    # The head gathers its input, and the embedding its gradient.
    assert sum(c.executions * (c.bytes // activations) for c in gathers) == 4 * LAYERS + 2
    scatters = sum(
        c.executions * c.bytes for c in step.collectives if c.kind == "reduce-scatter" and "tensor" in c.axes
    )
    # The counterparts of the gathers, and the lookup's sum.
    assert scatters == (4 * LAYERS + 1) * activations


def test_every_collective_of_the_layer_loop_hides_behind_matmuls():
    """Otherwise ZeRO-3 waits for the network in every layer, though it fetches ahead and returns behind."""
    model = LlamaConfig(256, 4, 1024, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=2048)
    plan = jaxpar.Plan("data=8", zero=3, precision="bfloat16", remat="full")
    step = jaxpar.Program(model.build, optax.sgd(0.1), plan).compile("1x8xh100", jaxpar.token_shapes(8, 1024))
    loops = [c for c in step.collectives if c.loop_depth]
    assert {c.kind for c in loops} == {"all-gather", "reduce-scatter"}
    assert [(c.kind, c.bytes) for c in loops if not c.overlaps_dot] == []


def test_zero_lowers_memory_as_it_should():
    """Otherwise a stage of ZeRO costs communication and gives nothing back."""
    bytes_by_stage = [
        jaxpar.Program(CONFIG.build, optax.adam(1e-3), jaxpar.Plan("data=8", zero=zero))
        .compile("1x8xcpu", jaxpar.token_shapes(ROWS, LENGTH))
        .argument_bytes
        for zero in (0, 1, 2, 3)
    ]
    parameters = sum(jax.tree.leaves(jax.tree.map(lambda i: FLOAT * _size(i.shape), dict(_structure().params))))
    batch = 3 * ROWS // 8 * LENGTH * FLOAT
    whole, part = parameters, parameters // 8
    expected = [3 * whole, whole + 2 * part, whole + 2 * part, 3 * part]
    for stage, (found, want) in enumerate(zip(bytes_by_stage, expected, strict=True)):
        assert abs(found - batch - want) <= 64, (stage, found, want + batch)


def _structure():
    return jaxpar.Program(CONFIG.build, optax.sgd(0.1), jaxpar.Plan("data=8")).structure


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
