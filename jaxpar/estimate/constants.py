"""The few constants of the estimator that no data sheet says.

Five are set, to what is commonly measured, since the published runs hardly tell them apart: `matmul_tail` (a half-full
last wave, on average), `memory`, `attention_width`, `fast`, `slow`. The others are fitted to the runs
(`experiments/bench/calibrate_time.py`, docs/estimate.md).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Without a unit, if none is said.

    Attributes:
      matmul: rate of a training step's large matrix products over the best one measured (`Device.matmul_fraction`).
      matmul_tail: waves; n waves of tiles over the cores take the time of n + `matmul_tail`.
      memory: rate of kernels that only move bytes over the memory's bandwidth.
      passes: bytes that the elementwise kernels of a layer move, over the least that fused ones could (casts, masks,
        bias gradients, what a layer does besides).
      attention_forward, attention_backward: rate of fused attention over the peak, for wide heads.
      attention_older: rate of kernels that were not written for the device (`System.attention` = `flash`), over that of
        those which were, beyond what `Device.tensor_share` says.
      attention_width: elements; a head of d features runs at d / (d + `attention_width`) of that (softmax, which does
        not grow with d).
      fp8_bytes: bytes moved for each element that a matrix product in float8 takes (scale, cast, transpose).
      fast, slow: rate of a large collective over the link's bandwidth, inside a domain and between domains.
      hidden_tensor: the part of tensor parallelism's communication that lies over matrix products where a system
        overlaps the two.
      contention: seconds that compute loses for each second of communication that lies over it (cores, memory).
      spread: relative standard deviation of how fast devices are: n of them wait for the slowest.
      step_seconds: s; what a step does once: loading, norms, logging, the host.
      kernel_seconds: s; idle between two kernels.
    """

    matmul: float = 0.92
    matmul_tail: float = 0.5
    memory: float = 0.85
    passes: float = 1.72
    attention_forward: float = 0.76
    attention_backward: float = 0.483
    attention_older: float = 0.686
    attention_width: float = 10.0
    fp8_bytes: float = 1.86
    fast: float = 0.8
    slow: float = 0.85
    hidden_tensor: float = 0.896
    contention: float = 0.408
    spread: float = 0.00952
    step_seconds: float = 0.0364
    kernel_seconds: float = 1.27e-05
