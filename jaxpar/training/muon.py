"""Muon on parameters of any rank: what is a matrix follows from logical names, layers are a batch of matrices."""

import math
from collections.abc import Mapping
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxpar.structure import ParamInfo
from jaxpar.training.matrices import matrix_dims
from jaxpar.training.per_parameter import scaled

# Liu et al., Muon is Scalable for LLM Training (2025): updates as large as Adam's, so that both share a learning rate.
_RMS = 0.2
_MOMENTUM = 0.95


def muon(params: Mapping[str, ParamInfo], b1: float, b2: float) -> optax.GradientTransformation:
    """Jordan et al. (2024) for linear maps between features; Adam with `b1`, `b2` for tables, scales and biases.

    The same as `optax.contrib.muon` on each layer's matrices, `[inputs, outputs]` flattened, before learning rate and
    decay.
    """
    numbers = muon_weight_dimension_numbers(params)

    def of_matrices(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {path: x if isinstance(x, optax.MaskedNode) else numbers[path] for path, x in tree.items()}

    scales = {path: _scale(info) for path, info in params.items() if numbers[path] is not None}
    matrices = optax.chain(scale_by_muon(beta=_MOMENTUM, weight_dimension_numbers=of_matrices), scaled(scales))
    labels = {path: "adam" if n is None else "muon" for path, n in numbers.items()}
    return optax.partition({"muon": matrices, "adam": optax.scale_by_adam(b1, b2)}, labels)


def _scale(info: ParamInfo) -> float:
    dims = matrix_dims(info)
    assert dims is not None
    larger = max(math.prod(info.dims[d] for d in side) for side in (dims.inputs, dims.outputs))
    return _RMS * math.sqrt(larger)


def muon_weight_dimension_numbers(params: Mapping[str, ParamInfo]) -> dict[str, MuonDimensionNumbers | None]:
    """For `optax.contrib.muon`: the dims of each matrix as the optimizer sees it; None: not for Muon.

    Counted from the back: a stack's `[virtual stage, stage, layer]`, and experts, are batches of matrices.
    """
    found: dict[str, MuonDimensionNumbers | None] = {}
    for path, info in params.items():
        dims, rank = matrix_dims(info), len(info.dims)
        found[path] = dims and MuonDimensionNumbers(
            tuple(d - rank for d in dims.inputs), tuple(d - rank for d in dims.outputs)
        )
    return found
