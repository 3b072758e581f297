"""What a model has to compute, by its sizes and by its parameters."""

import pytest

from jaxpar.errors import ModelError
from jaxpar.estimate.structure_work import work_of
from jaxpar.estimate.work import transformer
from jaxpar.structure import inspect_model
from jaxpar.training.flops import model_flops_per_token
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig

LLAMA = LlamaConfig(
    vocab_size=64, num_layers=8, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64, tie_embeddings=False
)
MOE = MoEConfig(
    vocab_size=64, num_layers=4, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64, num_experts=8,
    experts_per_token=2, moe_mlp_dim=48, num_dense_layers=1, tie_embeddings=False,
)  # fmt: skip
SIZES = dict(hidden=32, heads=8, kv_heads=4, head_dim=4, mlp=64, gated=True, vocab=64)


def by_role(layer):
    return {m.role: (m.k, m.n, m.split, m.count) for m in layer.matmuls}


def test_a_llama_by_its_parameters_is_a_transformer_of_its_sizes():
    """Otherwise plans of jaxpar's models would be judged by another model than published ones."""
    found, sized = work_of(inspect_model(LLAMA.build)), transformer(layers=8, **SIZES)
    ((mine, n),), ((theirs, _),) = found.layers, sized.layers
    assert (n, found.vocab, found.hidden) == (8, 64, 32)
    assert by_role(mine) == by_role(theirs)
    assert (mine.heads, mine.kv_heads, mine.head_dim, mine.gated) == (8, 4, 4, True)
    assert found.outer_parameters == sized.outer_parameters + 32  # the last norm


def test_experts_are_told_from_the_dense_layers_before_them():
    """Otherwise every layer would be charged for all experts, or none."""
    (dense, one), (sparse, three) = work_of(inspect_model(MOE.build), 2).layers
    assert (one, three, dense.experts, sparse.experts, sparse.active) == (1, 3, 0, 8, 2)
    assert sparse.expert_parameters == 8 * 3 * 32 * 48
    with pytest.raises(ModelError, match="experts_per_token"):
        work_of(inspect_model(MOE.build))


def test_three_projections_of_as_many_heads_are_query_key_and_value():
    """Otherwise models without grouped heads would send three times the keys round the ring."""
    config = GPTConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=128, num_positions=64)
    ((layer, _),) = work_of(inspect_model(config.build)).layers
    roles = by_role(layer)
    assert roles["query"][3] == 1 and roles["key"][3] == 2
    assert layer.kv_heads == layer.heads and not layer.gated


@pytest.mark.parametrize(("config", "active"), [(LLAMA, None), (MOE, 2)])
def test_flops_are_those_of_the_trainers_formula(config, active):
    """Otherwise MFU of an estimate and MFU of a run would not be the same thing."""
    structure = inspect_model(config.build)
    assert work_of(structure, active).flops_per_token(128) == model_flops_per_token(structure, 128, active)


def test_parameters_of_llama_70b_are_counted():
    """Otherwise gathers and optimizer would be timed for another model."""
    work = transformer(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672, gated=True, vocab=128256)
    assert work.parameters == pytest.approx(70.55e9, rel=1e-3)
