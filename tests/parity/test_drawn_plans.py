"""Plans, models and masks drawn at random equal one device. A failure prints the line that replays it."""

from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from experiments.parity_table import CASES
from jaxpar import Plan
from jaxpar.mesh import MeshShape
from jaxpar.pipeline import SCHEDULES, legal_microbatches
from models.llama import LlamaConfig
from tests.parity.references import assert_equals_one_device

MESHES = ("data=8", "data=4,tensor=2", "data=2,tensor=4", "tensor=8", "data=3,tensor=2", "data=2,tensor=3")
MESHES += ("seq=4", "data=2,seq=3", "data=2,tensor=2,seq=2")
PIPELINES = ("pipe=2", "pipe=3", "data=2,pipe=2,tensor=2", "data=2,pipe=3", "pipe=2,tensor=3", "pipe=4,tensor=2")


@st.composite
def models(draw, tensor: int, parts: int) -> LlamaConfig:
    """Sizes that are legal on `tensor` devices and in `parts` of a pipeline, and otherwise as odd as can be."""
    heads = 6 if tensor == 3 else 8
    return LlamaConfig(
        vocab_size=draw(st.sampled_from([61, 64, 67])),
        num_layers=parts - 1 + draw(st.sampled_from([1, 2, 3])),
        embed_dim=draw(st.sampled_from([20, 32, 37])),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([1, 3, 6] if tensor == 3 else [1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([4, 6])),
        mlp_dim=tensor * draw(st.sampled_from([3, 8])),
        tie_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@st.composite
def plans(draw) -> Plan:
    mesh = draw(st.sampled_from(MESHES))
    return Plan(
        mesh,
        attention=draw(st.sampled_from(["ring", "allgather", "ulysses"])) if "seq" in mesh else "ring",
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        microbatches=draw(st.sampled_from([1, 2, 3])),
        remat=draw(st.sampled_from(["none", "dots", "full"])),
        sequence_sharded_norms=draw(st.booleans()),
    )


@st.composite
def pipelines(draw) -> Plan:
    plan = draw(plans())
    mesh, name = draw(st.sampled_from(PIPELINES)), draw(st.sampled_from(SCHEDULES))
    virtual = draw(st.sampled_from([1, 2, 3])) if name == "interleaved" else 1
    fill = name.startswith("zero_bubble") and draw(st.booleans())
    least = legal_microbatches(name, MeshShape.parse(mesh).pipe, virtual, fill=fill).start
    microbatches = least - 1 + plan.microbatches
    return replace(plan, mesh=mesh, pipeline=name, virtual_stages=virtual, fill=fill, microbatches=microbatches)


# No shrinking: each step of it would compile for seconds, and the first failure already names plan and model.
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_any_legal_plan_of_any_model_equals_one_device(data):
    """Otherwise the table holds only for the sizes that somebody thought of."""
    check(data, data.draw(plans()), parts=1)


@settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_any_pipeline_of_any_model_equals_one_device(data):
    """Otherwise the schedules hold only for the numbers that somebody thought of."""
    plan = data.draw(pipelines())
    check(data, plan, parts=plan.shape.pipe * (2 if plan.pipeline == "zero_bubble_v" else plan.virtual_stages))


def check(data, plan: Plan, parts: int) -> None:
    config = data.draw(models(plan.shape.tensor, parts))
    kind = data.draw(st.sampled_from(sorted({weights for _, weights in CASES.values()})))
    assert_equals_one_device(config, plan, [kind], rows=plan.shape.data * plan.microbatches * 2, length=24)
