"""ZeRO and plain data parallelism: how a parameter is fetched before its use, and its gradient returned after.

| stage | parameters | gradients | reduced |
|---|---|---|---|
| 0 | replicated | replicated | once a step: all-reduce |
| 1 | replicated | sharded at the end | once a step: reduce-scatter |
| 2 | replicated | sharded | each microbatch: reduce-scatter |
| 3 | sharded, gathered per layer | sharded | each microbatch: reduce-scatter |

Within a node: shards lie in one node, and what has been scattered there is summed over the nodes, once a step.
Source: Rajbhandari et al., ZeRO (2020); Zhao et al., PyTorch FSDP (2023). Sums are float32 whatever the compute dtype;
those over devices, not those over microbatches, are bfloat16 if the plan's `reduce_dtype` says so.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpar import collectives
from jaxpar.mesh import REPLICA
from jaxpar.placement import Placement, pad, unpad
from jaxpar.structure import Params

Placements = Mapping[str, Placement]


def fetch(params: Params, placements: Placements, dtype: Any = None) -> Params:
    """Stored local parameters (without leading dims) -> what the model computes with: whole, unpadded, in `dtype`.

    Casts before it gathers, so that a bfloat16 plan moves half the bytes.
    """
    return {path: _fetch_one(x, placements[path], dtype) for path, x in params.items()}


def _fetch_one(x: Array, placement: Placement, dtype: Any) -> Array:
    dtype = placement.computes_in(dtype)
    if dtype is not None:
        x = x.astype(dtype)
    if placement.gathers:
        assert placement.zero_dim is not None
        x = collectives.all_gather(x, placement.zero_axes, placement.zero_dim, placement.tensor_spec)
    return unpad(x, placement.local(placement.info.dims))


def scatter(grads: Params, placements: Placements) -> Params:
    """One microbatch's gradients as they are accumulated: padded, float32, and with ZeRO 2 and 3 reduced and split."""
    return {path: _scatter_one(g, placements[path]) for path, g in grads.items()}


def _scatter_one(grad: Array, placement: Placement) -> Array:
    grad = pad(grad.astype(jnp.float32), placement.local(placement.padded))
    if placement.scatters_each_microbatch:
        return _reduce_scatter(grad, placement)
    return collectives.constrain(grad, placement.tensor_spec)


def _reduce_scatter(grad: Array, placement: Placement, lead: int = 0) -> Array:
    assert placement.zero_dim is not None
    spec = collectives.behind(lead, placement.tensor_spec)
    return collectives.psum_scatter(grad, placement.zero_axes, lead + placement.zero_dim, spec, placement.reduce_dtype)


def accumulator_shape(placement: Placement) -> tuple[int, ...]:
    """Local shape (over the manual axes) of what `scatter` returns, a stack's places in front."""
    sizes = list(placement.local(placement.padded))
    if placement.scatters_each_microbatch:
        assert placement.zero_dim is not None
        sizes[placement.zero_dim] //= prod(collectives.axis_size(axis) for axis in placement.zero_axes)
    return (*placement.local_lead, *sizes)


def finish(grads: Params, placements: Placements) -> Params:
    """What remains to be reduced at the end of the step; `grads` have a stack's places in front."""
    return {path: _finish_one(g, placements[path]) for path, g in grads.items()}


def _finish_one(grad: Array, placement: Placement) -> Array:
    lead = len(placement.local_lead)
    if not placement.scatters:
        grad = _all_reduce(grad, placement, lead, placement.replica_axes)
    elif not placement.scatters_each_microbatch:
        grad = _reduce_scatter(grad, placement, lead)
    if placement.scatters:
        grad = _all_reduce(grad, placement, lead, (REPLICA,))
    if placement.layers is not None:
        return grad.reshape(placement.layers.chunks, 1, placement.layers.longest, *grad.shape[1:])
    if placement.shared_over_pipe:
        return grad
    # All stages have computed the same.
    return collectives.from_stage(grad, 0)


def _all_reduce(grad: Array, placement: Placement, lead: int, axes: collectives.Axes) -> Array:
    spec = collectives.behind(lead, placement.tensor_spec)
    return collectives.psum_in(grad, axes, spec, placement.reduce_dtype)
