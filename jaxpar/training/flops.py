"""What a step has to compute, by formula, and what its devices could: the two sides of MFU."""

from math import prod

import numpy as np

from jaxpar.estimate.devices import device_named
from jaxpar.structure import ParamInfo, Structure


def model_flops_per_token(structure: Structure, length: int, experts_per_token: int | None = None) -> float | None:
    """FLOPs of forward and backward pass for one token in rows of `length` positions, by formula.

    `6 N + 6 H h T` for each layer with attention (PaLM, appendix B, with the causal half left out): N counts what a
    token is multiplied with, so every matrix, one table of the vocabulary and none of positions (a lookup multiplies
    nothing), and of an expert's matrices `experts_per_token` of E. Recomputation, padding and documents shorter than
    a row do not show: it is what the model needs, not what the program does. None where that cannot be said: experts,
    but not how many.
    """
    experts = [info for info in structure.params.values() if "experts" in info.names]
    if experts and experts_per_token is None:
        return None
    tables = sorted((prod(i.shape) for i in structure.params.values() if "vocab" in i.names), reverse=True)
    looked_up = {"vocab", "positions"}
    matrices = [i for i in structure.params.values() if _is_matrix(i) and not looked_up & set(i.names)]
    weights = sum(tables[:1]) + sum(_active(info, experts_per_token) for info in matrices)
    widths = sum(stack.length * _attention_width(structure, stack.name) for stack in structure.stacks)
    return 6.0 * weights + 6.0 * widths * length


def peak_flops(device_kind: str, dtype: np.dtype) -> float | None:
    """The peak FLOP/s of matrix products in `dtype` on a device of jax's name for it; None: not in the table."""
    device = device_named(device_kind)
    if device is None:
        return None
    return device.bf16_flops if dtype.itemsize == 2 else device.f32_flops


def _is_matrix(info: ParamInfo) -> bool:
    """Whether it has two sides: heads and a head's features are one side, which expert is none."""
    return len([name for name in info.names if name not in ("experts", "head_dim")]) >= 2


def _active(info: ParamInfo, experts_per_token: int | None) -> float:
    size = prod(info.shape)
    if "experts" not in info.names:
        return size
    return size * (experts_per_token or 0) / info.dims[info.names.index("experts")]


def _attention_width(structure: Structure, stack: str) -> int:
    """Query heads x features of a head, read off the parameters that name them; 0 where none does."""
    sides = [0]
    for info in structure.params.values():
        if info.stack == stack and "heads" in info.names:
            named = zip(info.names, info.dims, strict=True)
            sides.append(prod(n for name, n in named if name in ("heads", "head_dim")))
    return max(sides)
