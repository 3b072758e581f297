"""The protocol between a model and jaxpar: `named`, `stack`, `Term`, `Context`.

A model is single-device Flax code with three methods, `embed`, `head` and `terms`, and stacks of layers between
embedding and head. jaxpar owns the loop over layers; a layer is `(x, ctx) -> x` or `(x, {"term": total})`.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped

from jaxpar.axis_rules import NORM_POSITIONS, AxisRules, Names
from jaxpar.collectives import all_gather, axis_index, axis_size, constrain, psum, vary
from jaxpar.dropout import keep_mask, uniform
from jaxpar.errors import ModelError, PlanError
from jaxpar.mesh import ROW_AXES

# Metadata of a parameter.
LOGICAL_NAMES, FLOAT32, STEERED = "logical_names", "float32", "steered"


def named(init: nnx.Initializer, *names: str | P | None, float32: bool = False) -> nnx.Initializer:
    """An initializer whose parameter carries one logical name (or None) per dim, without the layer dim.

    `named(init, "embed", "mlp")`, or mesh axes directly: `named(init, P(None, "tensor"))`. `float32`: the model is
    given the parameter in its own dtype whatever the plan's precision, such as a router's.
    """
    dims = tuple(names[0]) if len(names) == 1 and isinstance(names[0], P) else names
    metadata: dict[str, Any] = {LOGICAL_NAMES: dims, FLOAT32: float32}
    return nnx.with_metadata(init, **metadata)


def steered(size: int, rate: float) -> nnx.Param:
    """`size` zeros that no loss moves: after each step those counted more than average become less by `rate`, others
    more. `steer` says what is counted. The optimizer, and the norm of gradients, do not see them.

    Source: Wang et al., Auxiliary-loss-free load balancing (2024).
    """
    metadata: dict[str, Any] = {LOGICAL_NAMES: (None,), FLOAT32: True, STEERED: rate}
    return nnx.Param(jax.numpy.zeros(size, "float32"), **metadata)


def steer[T](x: T, bias: Array, counts: Float[Array, " size"]) -> T:
    """`x` as it is, an array through which a loss passes; `counts` are added to what steers the `steered` bias.

    They travel as its gradient does: summed over all rows, positions, devices and microbatches of a step, once.
    """
    return _steer(x, bias, jax.lax.stop_gradient(counts))


@jax.custom_vjp
def _steer(x, bias, counts):  # type: ignore[no-untyped-def]
    return x


_steer.defvjp(
    lambda x, bias, counts: (x, counts),
    lambda counts, dx: (dx, counts, jax.numpy.zeros_like(counts)),
)


def logical_names(variable: nnx.Variable, rank: int) -> Names:
    """The names that `named` or flax's own metadata give the dims; Nones where there are none."""
    metadata = variable.get_metadata()
    names = metadata.get(LOGICAL_NAMES, metadata.get("out_sharding", metadata.get("sharding_names")))
    return (None,) * rank if names is None else tuple(names)


class Stack(nnx.Module):
    """`length` layers of one type; every parameter has a leading layer dim, in depth order. Made by `stack`."""

    def __init__(self, layers: nnx.Module, length: int):
        self.layers = layers
        self.length = length

    def __call__(self, x: Any, ctx: "Context") -> Any:
        """The layers one after the other on one device, auxiliary totals dropped: for use outside a program."""
        graphdef, state = nnx.split(self.layers)
        for depth in range(self.length):
            layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, d=depth: leaf[d], state))
            out = layer(x, ctx.at_depth(depth))
            x = out[0] if isinstance(out, tuple) else out
        return x


def stack(layer: Callable[..., nnx.Module], length: int, *args: Any, rngs: nnx.Rngs, **kwargs: Any) -> Stack:
    """`length` layers `layer(*args, rngs=rngs, **kwargs)`, each with its own random keys."""

    @nnx.split_rngs(splits=length)
    @nnx.vmap
    def create(rngs: nnx.Rngs) -> nnx.Module:
        return layer(*args, rngs=rngs, **kwargs)

    return Stack(create(rngs), length)


def save(x: Array, name: str) -> Array:
    """`x`, under a name by which `Plan(remat="named:...")` keeps it for the backward. Has no effect otherwise."""
    return checkpoint_name(x, name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Term:
    """One term of the objective: `coef * (sum of totals) / (sum of weights)`, both over the whole step.

    `weight` is a float32 scalar that depends on the batch alone and is additive over rows and positions: the sum of
    token weights, the number of rows.
    """

    weight: Float[Array, ""]
    coef: float = field(default=1.0, metadata={"static": True})


class Model(Protocol):
    """What jaxpar needs of a model, beside `Stack` attributes for its layers.

    Only `ctx.attend` sees positions of other devices. A module whose output at one position depends on others in any
    other way, such as a convolution over positions, says `mixes_positions = True` on its class: `seq` refuses it.
    One that sums over all rows of a step (`ctx.step_sum`) says `needs_whole_step = True`: microbatches and `pipe` are
    refused.
    """

    def embed(self, batch: dict[str, Array], ctx: "Context") -> Any: ...
    def head(self, x: Any, batch: dict[str, Array], ctx: "Context") -> dict[str, Float[Array, ""]]: ...
    def terms(self, batch: dict[str, Array]) -> dict[str, Term]: ...


Attention = Callable[..., Float[Array, "b t h d"]]
Neighbours = Callable[[Array, int, int], Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "index", "positions", "segments", "key", "depth"),
    meta_fields=("train", "attention", "neighbours", "routing", "rules", "sites", "whole_step"),
)
@dataclass(frozen=True)
class Context:
    """What model code knows about where it runs: its rows, its positions, and a way to the other devices."""

    rows: Int[Array, " b"]
    """Global row ids of the local rows."""
    index: Int[Array, " t"] | None
    """Global index in the row of the local positions; None when the batch has no positions."""
    positions: Int[Array, "b t"] | None
    """Position in its document of each token (rotary and learned positions use this)."""
    segments: Int[Array, "b t"] | None
    """Document of each token, 0 for padding; None when rows hold one document each."""
    key: Array
    """Random key of this step; the same on every device."""
    depth: Int[Array, ""]
    """Which layer this is, counted over all stacks; -1 in `embed`, the number of layers in `head`."""
    train: bool
    attention: Attention
    neighbours: Neighbours
    routing: Callable[..., tuple[Array, dict[str, Array]]]
    rules: AxisRules
    sites: Iterator[int]
    whole_step: bool = True
    """Whether all rows of a step are worked on at once: one microbatch, no pipeline, in training."""

    def at_depth(self, depth: Int[Array, ""] | int) -> "Context":
        """The context of one layer; its calls of `dropout` are counted from zero."""
        return replace(self, depth=jax.numpy.asarray(depth, "int32"), sites=itertools.count())

    @property
    def splits_positions(self) -> bool:
        """Whether activations between matmuls hold only part of the positions: sequence-sharded norms."""
        return self.rules.axes.get(NORM_POSITIONS) == "tensor"

    def attend(
        self,
        q: Float[Array, "b t h d"],
        k: Float[Array, "b t kv d"],
        v: Float[Array, "b t kv d"],
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> Float[Array, "b t h d"]:
        """Exact softmax attention within documents; query head `i` uses kv head `i // (h / kv)`.

        `window`: a query sees itself and the `window - 1` positions before it; needs `causal`. Positions may be split
        over `seq`. Never builds a full matrix of positions by positions. Follows Dao, FlashAttention-2 (2023). What
        comes in has the name `qkv` and the result `attention`, for `Plan(remat="named:...")`.
        """
        if window is not None and (window < 1 or not causal):
            raise ModelError(f"attend(window={window}, causal={causal}): a window is causal, of 1 position or more")
        heads, kv_heads = q.shape[2], k.shape[2]
        if heads % kv_heads:
            raise ModelError(
                f"attend: {heads} query heads over {kv_heads} kv heads; each kv head serves equally many: give a "
                f"multiple"
            )
        if kv_heads % axis_size("tensor"):
            # Few heads are whole on every device: left alone, XLA splits them over some, and gathers them back.
            k, v = (constrain(a, P()) for a in (k, v))
        q, k, v = (save(a, "qkv") for a in (q, k, v))
        return self.attention(q, k, v, segments=self.segments, causal=causal, window=window)

    def halo(self, x: Shaped[Array, "b t *d"], before: int, after: int = 0) -> Shaped[Array, "s n *d"]:
        """Stretches of positions that follow each other, with `before` more in front and `after` more behind.

        For convolutions over positions, whose neighbours may lie on another device of `seq`. The t positions at hand
        lie in p stretches (1 or 2): `[b, t, ...] -> [b * p, before + t / p + after, ...]`, zeros beyond the ends of a
        row. A layer made for rows runs on it unpadded, and `y.reshape(b, t, ...)` puts its result back in place.
        Documents packed in a row are the layer's to keep apart: `ctx.halo(ctx.segments, before)` says whose a
        neighbour is. Raises `PlanError` for a halo longer than a stretch.
        """
        return self.neighbours(x, before, after)

    def route(
        self,
        x: Float[Array, "b t d"],
        expert: Int[Array, "b t k"],
        weight: Float[Array, "b t k"],
        run: Callable[..., Float[Array, "s f"]],
        *kernels: nnx.Param,
    ) -> tuple[Float[Array, "b t f"], dict[str, Float[Array, ""]]]:
        """For every token the sum, by `weight`, of what its `k` experts make of it, and counts of (token, expert).

        `run(rows, *kernels)` is what an expert does to its rows; each of the kernels that it is given is a function,
        which multiplies every row by its own expert's `[in, out]`. They are parameters `float[experts, in, out]`, made
        with names: "experts" first. Experts may be spread over `expert`, and their features over `tensor`; then between
        kernels only what acts on every feature alone is possible. `run` must not use other arrays.

        A pair with an expert that there is not is left out, and so is padding (segment 0): it gives zeros. The counts,
        to be added to a layer's totals: `routed` pairs, `dropped` ones beyond a capacity, and of those routed
        `overflow`, which went in further rounds. Raises `ModelError`, and `PlanError` for what `tensor` cannot split.
        """
        names = [logical_names(k, 3) if isinstance(k, nnx.Variable) else () for k in kernels]
        if not kernels or any(not n or n[0] is None for n in names):
            raise ModelError(
                f"ctx.route needs kernels that are parameters of 3 dims, named 'experts' and two more: found {names}; "
                f"make them with jaxpar.named(init, 'experts', 'embed', 'mlp')"
            )
        shapes = [kernel[...].shape for kernel in kernels]
        spread = axis_size("expert") if self.rules.axis(names[0][0]) == "expert" else 1
        if self.segments is not None:
            expert = jax.numpy.where(self.segments[..., None] > 0, expert, shapes[0][0] * spread)
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, expert, weight))
        dims = [self._tensor_dim(n, shape) for n, shape in zip(names, shapes, strict=True)]
        y, counts = self.routing(*flat, run, [kernel[...] for kernel in kernels], dims, spread)
        return y.reshape(*x.shape[:-1], -1), counts

    def _tensor_dim(self, names: Names, shape: tuple[int, ...]) -> int | None:
        """Which dim of an array is split over `tensor`."""
        shards = axis_size("tensor")
        split = [i for i, name in enumerate(names) if self._tensor_axis(name, shape[i])] if shards > 1 else []
        return split[0] if split else None

    def row_sum[T](self, tree: T) -> T:
        """Sums over positions that were taken of the local ones, made sums over the whole row.

        Every part of a row then has the whole sum: what is made of it counts `1 / row_parts` on each.
        """
        return jax.tree.map(lambda x: vary(psum(x, ("seq",))), tree)

    def step_sum[T](self, tree: T) -> T:
        """Sums over the rows and positions at hand, made sums over all of the step.

        For what is no sum over rows itself. Every device then has the whole sum: what is made of it counts a share on
        each, such as its part of the rows, and `1 / row_parts` of that. A microbatch has a part of the rows alone: a
        module that calls this says `needs_whole_step = True`, so that such plans are refused before. When evaluating
        there is no step (`ctx.train`): rows come in parts. Raises `PlanError`.
        """
        if not self.whole_step:
            raise PlanError("ctx.step_sum needs all rows at once: set microbatches=1 and pipe=1; none when evaluating")
        return jax.tree.map(lambda x: vary(psum(x, (*ROW_AXES, "seq"))), tree)

    def row_gather(self, x: Shaped[Array, "b t *d"]) -> Shaped[Array, "b s *d"]:
        """What all positions of the row have, in the order in which `seq` holds them. Has no gradient."""
        gathered = all_gather(jax.lax.stop_gradient(x), ("seq",), 1, P()) if self.row_parts > 1 else x
        return jax.lax.stop_gradient(gathered)

    def row_part(self, x: Array, dim: int) -> Array:
        """Of `dim`, positions as `row_gather` orders them, those at hand: its inverse."""
        size = x.shape[dim] // self.row_parts
        return jax.lax.dynamic_slice_in_dim(x, axis_index("seq") * size, size, dim % x.ndim)

    @property
    def row_parts(self) -> int:
        """Into how many parts `seq` splits a row."""
        return axis_size("seq")

    def constrain(self, x: Array, *names: str | None) -> Array:
        """Tells XLA how the dims of an activation lie over `tensor`, by logical names; None: not split.

        A dim that does not divide, such as few kv heads whose weights are replicated, is not split either.
        """
        return constrain(x, P(*map(self._tensor_axis, names, x.shape)))

    def _tensor_axis(self, name: str | None, size: int) -> str | None:
        return "tensor" if self.rules.axis(name) == "tensor" and size % axis_size("tensor") == 0 else None

    def dropout(self, x: Float[Array, "b ..."], rate: float) -> Float[Array, "b ..."]:
        """Zeroes a share `rate` of the elements and scales the rest by `1 / (1 - rate)`; `x` as is when evaluating.

        The mask is a function of (seed, step, depth, call within the layer, global row, position, feature) alone: it
        is the same on every mesh, and is recomputed, never communicated.
        """
        if not self.train or rate == 0.0:
            return x
        keep = keep_mask(self._site_key(), self.rows, self.index, x.shape, rate)
        return jax.numpy.where(keep, x / (1.0 - rate), 0).astype(x.dtype)

    def jitter(self, x: Float[Array, "b ..."], most: float) -> Float[Array, "b ..."]:
        """Multiplies each element by a factor, uniform between `1 - most` and `1 + most`; drawn as for `dropout`."""
        if not self.train or most == 0.0:
            return x
        factor = 1.0 + most * (2.0 * uniform(self._site_key(), self.rows, self.index, x.shape) - 1.0)
        return (x * factor).astype(x.dtype)

    def _site_key(self) -> Array:
        return jax.random.fold_in(jax.random.fold_in(self.key, self.depth), next(self.sites))
