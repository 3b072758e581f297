"""What `seq` communicates in the compiled step is what each mode promises, and no more.

Letters: L layers, R groups in a ring, u members of a group; `q` and `kv` bytes of one device's queries and of its keys,
which are as many as those of its values.
"""

import jax
import optax
import pytest

import jaxpar
from jaxpar import Hybrid, Plan, Program
from jaxpar.estimate.compile import StepReport
from jaxpar.parallel.sequence import SequenceLayout
from jaxpar.run import Run
from models.llama import LlamaConfig
from tests.test_communication import CONFIG, FLOAT, assert_promised, compiled_for, data_bytes

ROWS, LENGTH = 8, 64
PLANS = [
    Plan("seq=8", zero=3, microbatches=2),
    Plan("tensor=2,seq=4"),
    Plan("seq=8", attention="ulysses"),
    Plan("tensor=2,seq=4", attention="ulysses", zero=1),
    Plan("seq=8", attention="allgather"),
    Plan("data=2,seq=4", attention=Hybrid(2)),
]


def shapes(packed: bool) -> dict[str, jax.ShapeDtypeStruct]:
    more = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), "int32") for name in ("segments", "positions")}
    return jaxpar.token_shapes(ROWS, LENGTH) | (more if packed else {})


def promised(run: Run, packed: bool, hops: int | None = None) -> dict[str, int]:
    """Bytes over `seq`, by kind: of attention, of the batch, of parameters and their gradients.

    `hops`: how often documents are sent on; None: as often as keys.
    """
    plan, sizes = run.plan, run.plan.shape.sizes
    layout, tensor = SequenceLayout.of(plan, sizes["seq"]), sizes["tensor"]
    tokens = ROWS // sizes["data"] * LENGTH // sizes["seq"] * FLOAT
    kv_heads = CONFIG.num_kv_heads if layout.members == 1 else max(CONFIG.num_kv_heads, layout.members * tensor)
    q, kv = (tokens * heads // tensor * CONFIG.head_dim for heads in (CONFIG.num_heads, kv_heads))
    found = dict(data_bytes(run))

    def add(kind: str, size: int) -> None:
        found[kind] = found.get(kind, 0) + size

    layers, groups = CONFIG.num_layers, layout.groups
    if layout.gathers:
        # Keys and values before the forward, again before the backward; their gradients once.
        add("all-gather", layers * 2 * 2 * kv * groups)
        add("reduce-scatter", layers * 2 * kv * groups)
    elif groups > 1:
        # Keys and values once round, forward and backward; their gradients one device further: home.
        add("collective-permute", layers * (2 * 2 * kv * (groups - 1) + 2 * kv * groups))
        if packed:
            hops = layers * 2 * (groups - 1) if hops is None else hops
            add("collective-permute", hops * tokens * layout.members)
    if layout.members > 1:
        # Four arrays each way: q, k, v and the output; its gradient and those of q, k, v.
        add("all-to-all", layers * 2 * (2 * q + 2 * kv))
    # Devices take their positions from whole rows; in natural order they have them, and only weights are gathered.
    arrays = (5 if packed else 3) if groups > 1 else 1
    add("all-gather", arrays * tokens * sizes["seq"])
    return found


def over_seq(step: StepReport) -> dict[str, int]:
    """By kind, leaving out scalars. Groups inside `seq` have a name of their own, such as `seq:(2)2`."""
    found: dict[str, int] = {}
    for c in step.collectives:
        if any(axis.partition(":")[0] == "seq" for axis in c.axes) and c.bytes >= 64:
            found[c.kind] = found.get(c.kind, 0) + c.executions * c.bytes
    return found


# One of each mode is compiled for GPUs as well, which takes twice as long; plain `ulysses` is in `Hybrid`.
FOR_GPUS = [PLANS[i] for i in (0, 1, 4, 5)]


@pytest.mark.parametrize(
    ("plan", "cluster"),
    [*((plan, "1x8xcpu") for plan in PLANS), *((plan, "1x8xh100") for plan in FOR_GPUS)],
    ids=str,
)
def test_each_mode_moves_the_bytes_of_its_formula(plan, cluster):
    """Otherwise a mode moves more than it promises, or XLA gathers positions or heads in silence."""
    run, step = compiled_for(plan, cluster, shapes(packed=False))
    assert_promised(over_seq(step), promised(run, packed=False))
    assert {c.kind for c in step.collectives if "tensor" in c.axes} <= {"all-reduce"}


@pytest.mark.parametrize("cluster", ["1x8xcpu", "1x8xh100"])
def test_documents_travel_with_their_keys(cluster):
    """Otherwise they are gathered whole, in every layer."""
    run, step = compiled_for(Plan("data=2,seq=4"), cluster, shapes(packed=True))
    # XLA for CPU knows that all layers send the same first: it does so once, before them, for both ways.
    hops = {"1x8xcpu": CONFIG.num_layers * 2 * 2 + 1, "1x8xh100": None}[cluster]
    assert_promised(over_seq(step), promised(run, packed=True, hops=hops))


@pytest.mark.parametrize("mesh", ["seq=8", "tensor=2,seq=4"])
def test_every_send_of_the_ring_hides_behind_the_blocks_of_another_part(mesh):
    """Otherwise each layer waits for the network R times forward, and R times backward."""
    model = LlamaConfig(256, 2, 1024, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=2048)
    plan = Plan(mesh, precision="bfloat16", remat="full")
    step = Program(model.build, optax.sgd(0.1), plan).compile("1x8xh100", jaxpar.token_shapes(2, 8192))
    sends = [c for c in step.collectives if c.kind == "collective-permute"]
    whole, hidden = (sum(c.executions * c.bytes for c in s) for s in (sends, [c for c in sends if c.overlaps_dot]))
    assert {c.axes for c in sends} == {("seq",)} and hidden >= 0.9 * whole
