"""The time of kernels on one device, by shape."""

from dataclasses import replace

import pytest

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import device
from jaxpar.estimate.matmul import Rates

H100 = device("h100")
RATES = Rates(H100, Constants(kernel_seconds=0.0))


def share_of_peak(m: int, k: int, n: int, precision: str = "bfloat16") -> float:
    return 2 * m * k * n / RATES.matmul(m, k, n, precision) / RATES.peak(precision)


def test_large_products_run_at_the_sustained_rate_and_small_ones_do_not():
    """Otherwise splitting a matrix over ever more devices would seem free."""
    assert 0.97 < share_of_peak(16384, 8192, 28672) <= 1
    assert share_of_peak(16384, 8192, 1024) < 0.95
    assert share_of_peak(64, 8192, 1024) < 0.4


def test_a_row_alone_is_limited_by_memory():
    """Otherwise a product that only reads its weights would be timed by its FLOPs."""
    seconds = RATES.matmul(1, 8192, 8192, "bfloat16")
    assert seconds == pytest.approx(2 * 8192**2 / (H100.memory_bandwidth * Constants().memory), rel=0.01)


def test_more_of_anything_takes_longer():
    """Otherwise a planner could win by adding work."""
    base = RATES.matmul(4096, 4096, 4096, "bfloat16")
    assert all(
        RATES.matmul(*shape, "bfloat16") > base
        for shape in [(8192, 4096, 4096), (4096, 8192, 4096), (4096, 4096, 8192)]
    )


def test_narrower_precision_is_faster_where_the_device_has_it():
    """Otherwise float8 would be chosen on an A100."""
    times = [RATES.matmul(8192, 8192, 8192, precision) for precision in ("float32", "bfloat16", "fp8")]
    assert times == sorted(times, reverse=True)
    ampere = Rates(device("a100"), Constants())
    assert ampere.peak("fp8") == ampere.peak("bfloat16")


def test_attention_written_for_ampere_reaches_half_of_hopper():
    """Otherwise FlashAttention-2 on an H100 would be timed as cuDNN's."""
    old, new = (RATES.attention(1e13, 128, True, older) for older in (True, False))
    assert old > 2 * new


def test_twice_the_memory_bandwidth_halves_what_only_moves():
    """Otherwise an H200 would gain nothing over an H100."""
    faster = Rates(replace(H100, memory_bandwidth=2 * H100.memory_bandwidth), Constants())
    assert faster.moved(1e9) == pytest.approx(RATES.moved(1e9) / 2)
