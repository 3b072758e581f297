"""The communication of experts is what the exchange promises: twice forward and twice back, and no weights.

Letters: N tokens of a device, K experts of each, D features, G devices of `expert`, L layers with experts.
"""

from dataclasses import replace

import optax
import pytest

import jaxpar
from jaxpar.estimate.compile import StepReport, report
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.topology import compiler_options, topology_devices
from models.moe import MoEConfig

ROWS, LENGTH, EMBED, LAYERS, CHOSEN = 32, 16, 32, 2, 2
CONFIG = MoEConfig(
    64, LAYERS, EMBED, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64, num_experts=8, experts_per_token=CHOSEN
)
FLOAT = 4
PLANS = [
    jaxpar.Plan("data=2,expert=4", experts=jaxpar.Capacity(1.0)),
    jaxpar.Plan("expert=8", experts=jaxpar.Capacity(2.0)),
]


def compiled(plan: jaxpar.Plan, cluster: str) -> StepReport:
    run = jaxpar.Program(CONFIG.build, optax.sgd(0.1), plan).on(topology_devices(Cluster.parse(cluster)))
    return report(run.lower(jaxpar.token_shapes(ROWS, LENGTH)), run.mesh)


def rows_sent(devices: int, share: float) -> int:
    """Of one half of the tokens, the places in what one device sends."""
    pairs = ROWS * LENGTH // 8 * CHOSEN // 2
    return devices * min(pairs, -(-int(pairs * share) // devices) + 1)


@pytest.mark.parametrize("cluster", ["1x8xcpu", "1x8xh100"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tokens_go_and_come_back_twice_each_way(plan, cluster):
    """Otherwise more is sent than the stated buffers, or a backward sends what the forward has sent already."""
    step = compiled(plan, cluster)
    found = [c for c in step.collectives if c.kind == "all-to-all"]
    assert all(c.axes == ("expert",) for c in found)
    devices = plan.shape.expert
    rows = rows_sent(devices, plan.capacity)
    # There and back, forward and backward, in two halves; which experts they are for goes along, once.
    activations, experts = 8 * LAYERS * rows * EMBED * FLOAT, 2 * LAYERS * rows * FLOAT
    assert sum(c.executions * c.bytes for c in found) == activations + experts
    if cluster == "1x8xh100":
        # One half travels while experts work on the other: all but the last to come home, and one of four backward.
        assert sum(c.overlaps_dot for c in found if c.bytes == rows * EMBED * FLOAT) >= 4


def test_a_ragged_exchange_sends_rows_in_no_other_way():
    """Otherwise padding travels all the same; the sizes follow from which experts the rows are for, which go along."""
    step = compiled(jaxpar.Plan("data=2,expert=4", experts=jaxpar.Capacity(1.0, exchange="ragged")), "1x8xh100")
    rows = rows_sent(4, 1.0)
    ragged = [c for c in step.collectives if c.kind == "ragged-all-to-all"]
    assert all(c.axes == ("expert",) and c.bytes == rows * EMBED * FLOAT for c in ragged)
    assert sum(c.executions for c in ragged) == 8 * LAYERS
    assert all(c.bytes == rows * FLOAT for c in step.collectives if c.kind == "all-to-all")


@pytest.mark.parametrize("cluster", ["1x8xcpu", "1x8xh100"])
def test_no_weights_and_no_whole_batch_travel_over_expert(cluster):
    """Otherwise memory and traffic would grow with all experts, which sharding is to prevent."""
    step = compiled(jaxpar.Plan("expert=4,tensor=2", microbatches=2), cluster)
    kinds = {c.kind for c in step.collectives if "expert" in c.axes and c.bytes > 64}
    assert kinds <= {"all-to-all", "all-reduce"}
    dense = sum(c.bytes * c.executions for c in step.collectives if "expert" in c.axes and c.kind == "all-reduce")
    shapes = jaxpar.Program(CONFIG.build, optax.sgd(0.1), jaxpar.Plan("data=1")).structure.params
    experts = sum(
        FLOAT * i.shape[0] * i.shape[1] * i.shape[2] * i.shape[3] for i in shapes.values() if len(i.shape) == 4
    )
    assert 0 < dense < experts / 2
    over_tensor = [c for c in step.collectives if c.axes == ("tensor",) and c.kind == "all-reduce"]
    # One sum for the attention and one for the experts, forward and backward, and the ends'; not one for every tile.
    assert max(c.executions for c in over_tensor) <= 2 * LAYERS


def test_a_plan_with_kernels_has_three_launches_for_every_matmul_of_experts():
    """Otherwise a product of the step is left to the loop, or Hopper's compiler does not take the kernels there.

    Forward, rows' gradient and kernels' gradient, of three matmuls in two halves of the tokens.
    """
    config = replace(CONFIG, embed_dim=64, moe_mlp_dim=128, num_layers=1)
    experts = jaxpar.Capacity(1.0, kernel="pallas")
    plan = jaxpar.Plan("expert=4,tensor=2", precision="bfloat16", experts=experts)
    run = jaxpar.Program(config.build, optax.sgd(0.1), plan).on(topology_devices(Cluster.parse("1x8xh100")))
    lowered = run.lower(jaxpar.token_shapes(ROWS, LENGTH))
    text = lowered.compile(compiler_options=compiler_options("gpu")).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3 * 3 * 2
