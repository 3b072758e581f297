"""A device's memory does not grow with the rows that it shares."""

import pytest

from experiments.bench.context_memory import Case
from models.llama import LlamaConfig

# The proportions of Llama 3 8B.
CASE = Case(LlamaConfig(1024, 2, 64, num_heads=8, num_kv_heads=2, head_dim=8, mlp_dim=224), tokens=512)


@pytest.fixture(scope="module")
def alone():
    return CASE.compile(1, "ring", "full").peak_bytes


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_eight_times_the_row_on_eight_devices_takes_the_same_memory(alone, attention):
    """Otherwise more devices would not mean longer rows; 10 % are for what is under way."""
    assert CASE.compile(8, attention, "full").peak_bytes <= 1.1 * alone


def test_gathered_keys_grow_by_their_formula():
    """Otherwise nobody could say how many devices gathering is good for. As many key heads as query heads, so that
    attention is the peak."""
    case = Case(LlamaConfig(256, 2, 64, num_heads=8, num_kv_heads=8, head_dim=8, mlp_dim=128), tokens=512)
    four, eight = (case.compile(seq, "allgather", "full").peak_bytes for seq in (4, 8))
    formula = case.gathered_bytes(8) - case.gathered_bytes(4)
    assert formula <= eight - four <= 1.3 * formula  # one array of float32 more, with some of XLA's optimizations
