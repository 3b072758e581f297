"""Experts whose kernels are split over `tensor`: every device works on its features, and one sum joins them.

Left to the compiler, each tile of a grouped matmul would be summed over `tensor` by itself, thousands a step. Here the
whole exchange runs on each device's features, tokens and results being the same on all; what its experts make of a
token is weighted and added up first, so that a sum moves one activation a layer, forward and backward.

A gradient is written out: a region within the region cannot be differentiated by jax (see `attention.on_own_heads`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import vary_nested
from jaxpar.parallel.attention import on_own_heads
from jaxpar.parallel.expert_split import sums_over_tensor


def on_own_features(
    exchange: Callable[..., Array], run: Callable[..., Array], dims: Sequence[int | None]
) -> Callable[..., Array]:
    """`exchange(x, weight, expert, *kernels)` -> float32[N, F], on kernels of which dim `dims` is split over `tensor`.

    Raises `PlanError` for an expert `run` that cannot be computed on split features.
    """

    def call(x: Array, weight: Array, expert: Array, *kernels: Array) -> Array:
        rows = jax.ShapeDtypeStruct((8, x.shape[1]), x.dtype)
        if all(dim is None for dim in dims) or not sums_over_tensor(run, rows, kernels, dims):
            return exchange(x, weight, expert, *kernels)
        return _routed(_Split(exchange, tuple(dims)), x, weight, kernels, expert)

    return call


@dataclass(frozen=True)
class _Split:
    exchange: Callable[..., Array]
    dims: tuple[int | None, ...]

    @property
    def specs(self) -> tuple[P, ...]:
        return tuple(P(*("tensor" if i == dim else None for i in range(3))) for dim in self.dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(split: _Split, x: Array, weight: Array, kernels: tuple[Array, ...], expert: Array) -> Array:
    return _routed_fwd(split, x, weight, kernels, expert)[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("leaves", "inputs"), meta_fields=("known", "treedef"))
@dataclass(frozen=True)
class _Saved:
    """What the backward needs: `leaves` of the function that `jax.vjp` returned, a device's in front; those that are an
    input are left out, and `known` says which one each is. `inputs`: x, weight, expert, kernels."""

    leaves: list[Array]
    inputs: tuple[Array, ...]
    known: tuple[int | None, ...]
    treedef: Any


def _routed_fwd(split: _Split, x: Array, weight: Array, kernels: tuple[Array, ...], expert: Array) -> Any:
    learned: list[Any] = []

    def local(*inputs: Array) -> tuple[Array, list[Array]]:
        x, weight, expert, *kernels = inputs = vary_nested(inputs)
        out, vjp = jax.vjp(lambda x, w, ks: split.exchange(x, w, expert, *ks), x, weight, kernels)
        leaves, treedef = jax.tree.flatten(vjp)
        known = tuple(next((i for i, k in enumerate(inputs) if leaf is k), None) for leaf in leaves)
        learned.append((known, treedef))
        new = [vary_nested(jnp.asarray(leaf))[None] for leaf, k in zip(leaves, known, strict=True) if k is None]
        return lax.psum(out.astype(x.dtype), "tensor"), new

    inputs = (x, weight, expert, *kernels)
    out, leaves = on_own_heads(local, 2, (P(), P(), P(), *split.specs), (P(), P("tensor")))(*inputs)
    return out, _Saved(leaves, inputs, *learned[-1])


def _routed_bwd(split: _Split, saved: _Saved, d_out: Array) -> Any:
    def local(leaves: list[Array], d_out: Array, *inputs: Array) -> tuple[Array, ...]:
        inputs, stored = vary_nested(inputs), iter([leaf[0] for leaf in leaves])
        vjp = jax.tree.unflatten(saved.treedef, [next(stored) if k is None else inputs[k] for k in saved.known])
        dx, dweight, dkernels = vjp(vary_nested(d_out.astype(jnp.float32)))
        return lax.psum(dx, "tensor"), lax.psum(dweight, "tensor"), *dkernels

    in_specs = (P("tensor"), P(), P(), P(), P(), *split.specs)
    call = on_own_heads(local, 2, in_specs, (P(), P(), *split.specs))
    dx, dweight, *dkernels = call(saved.leaves, d_out, *saved.inputs)
    return dx, dweight, tuple(dkernels), None


_routed.defvjp(_routed_fwd, _routed_bwd)
