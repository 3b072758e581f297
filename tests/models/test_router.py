"""Routers choose and weigh as their papers say."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import ConfigError
from models.moe import MoEConfig
from models.router import RouterConfig, choose


@pytest.mark.parametrize(
    ("kind", "normalize", "weigh"),
    [
        ("topk_softmax", False, lambda every, best: np.exp(best) / np.exp(best).sum()),
        ("softmax", False, lambda every, best: np.exp(best) / np.exp(every).sum()),
        ("softmax", True, lambda every, best: np.exp(best) / np.exp(best).sum()),
        ("sigmoid", False, lambda every, best: 1 / (1 + np.exp(-best))),
        ("sigmoid", True, lambda every, best: (1 / (1 + np.exp(-best))) / (1 / (1 + np.exp(-best))).sum()),
    ],
)
def test_weights_are_those_of_the_papers(kind, normalize, weigh):
    """Otherwise weights imported from one of these models would mean another one."""
    every = np.asarray([3.0, 1.0, 2.0, 0.0])
    expert, weight = choose(jnp.asarray(every)[None, None], RouterConfig(4, 2, kind, normalize))
    assert expert[0, 0].tolist() == [0, 2]
    assert np.allclose(weight[0, 0], weigh(every, every[[0, 2]]), atol=1e-6)


def test_experts_come_from_the_groups_whose_two_best_add_up_to_most():
    """Otherwise a token is sent to more devices than its groups are, or to others than DeepSeek-V3 would choose."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 50, 12)).astype(np.float32)
    expert, _ = choose(jnp.asarray(logits), RouterConfig(12, 3, "sigmoid", groups=4, chosen_groups=2))
    for row, chosen in zip(logits.reshape(-1, 4, 3), np.asarray(expert).reshape(-1, 3), strict=True):
        score = 1 / (1 + np.exp(-row))
        groups = np.argsort(np.sort(score, axis=1)[:, -2:].sum(axis=1))[-2:]
        allowed = [3 * g + i for g in groups for i in range(3)]
        assert set(chosen) == set(sorted(allowed, key=lambda e: -score.reshape(-1)[e])[:3])


def test_a_bias_moves_the_choice_and_not_the_weights():
    """Otherwise balancing would change what the experts' results are worth."""
    logits = jnp.asarray([[[2.0, 1.0, 0.0]]])
    expert, weight = choose(logits, RouterConfig(3, 1, "sigmoid", normalize=False), jnp.asarray([0.0, 0.0, 1.0]))
    assert expert[0, 0].tolist() == [2] and float(weight[0, 0, 0]) == 0.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9: needs 1 to num_experts=8"),
        ({"expert_groups": 3}, "expert_groups=3 does not divide num_experts=8"),
        ({"expert_groups": 4, "groups_per_token": 5}, "needs 1 to 4"),
        ({"expert_groups": 8, "experts_per_token": 2}, "at least experts_per_token=2 experts in them; found 1"),
    ],
)
def test_a_router_that_cannot_be_is_refused_with_its_numbers(wrong, said):
    """Otherwise top-k would fail while tracing, or choose experts of no group."""
    with pytest.raises(ConfigError, match=said):
        MoEConfig(vocab_size=8, num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, **wrong)
