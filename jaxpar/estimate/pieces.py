"""The pieces of a train step, each traced once on abstract arrays: what a layer saves, and what each needs as it runs.

A piece depends on the sizes of what one device works on at a time, and not on how many do so: plans that differ in
`data`, ZeRO, schedule or microbatches alone share theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxpar import collectives
from jaxpar.batch import BatchAxes
from jaxpar.estimate.kernels import nbytes
from jaxpar.estimate.liveness import Piece, Platform, piece
from jaxpar.estimate.tensor_split import Dim, of_spec
from jaxpar.executor.chunks import Chunks
from jaxpar.executor.ends import Ends
from jaxpar.executor.region import Region
from jaxpar.mesh import AXES
from jaxpar.placement import place
from jaxpar.plan import Plan
from jaxpar.structure import Structure

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class StackPieces:
    """Of one layer and one microbatch, in bytes on one device. `saved`: kept from forward to backward, by array, and
    `on_host` of these; `between`: what a split backward hands to its weights' part. `forward`, `backward`, `weights`:
    alive at once while one runs, beside what is carried from layer to layer."""

    saved: int
    on_host: int
    between: int
    forward: int
    backward: int
    weights: int


@dataclass(frozen=True)
class Pieces:
    """`activation`: a layer's input, one microbatch. `embed`, `head`, `unembed`: alive at once while one runs."""

    stacks: tuple[StackPieces, ...]
    activation: int
    embed: int
    head: int
    unembed: int


def trace_pieces(
    structure: Structure, batch_axes: BatchAxes, plan: Plan, shapes: Shapes, split: bool, platform: Platform
) -> Pieces:
    """`shapes`: of what one device of `data` works on at a time: a microbatch's rows, whole positions. The plan's mesh
    is resolved. `split`: the schedule parts a backward in two."""
    sizes = plan.shape.sizes | {"data": 1}
    mesh: Any = AbstractMesh(tuple(sizes[a] for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    plain = replace(
        plan, mesh=f"pipe={sizes['pipe']},tensor={sizes['tensor']},seq={sizes['seq']},expert={sizes['expert']}",
        zero=0, within_node=False, microbatches=1, pipeline="1f1b", virtual_stages=1, stage_layers=None, fill=False,
    )  # fmt: skip
    placements = place(structure, plain, mesh)
    region = Region(structure, placements, plain, batch_axes, mesh)
    tracer = _Tracer(region, split, plan.zero == 3, sizes["tensor"], platform)
    arrays: Any = dict(shapes)
    step = region._shard_map(tracer.trace, arrays, ())
    params = {path: jax.ShapeDtypeStruct(p.storage_shape, p.info.dtype) for path, p in placements.items()}
    rows = next(iter(shapes.values())).shape[0]
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(step, params, dict(shapes), jax.ShapeDtypeStruct((rows,), jnp.int32), key)
    assert tracer.found is not None
    return tracer.found


@dataclass
class _Tracer:
    region: Region
    split: bool
    gathers: bool
    tensor: int
    platform: Platform
    found: Pieces | None = None

    def trace(self, params: Any, batch: Any, rows: Any, key: Any) -> tuple[()]:
        """Inside the region, where every shape but for `tensor` is a device's own."""
        region = self.region
        params, batch, rows, key = collectives.vary((params, batch, rows, key))
        ends, chunks = region._ends(params), region._chunks(params)
        whole, batch = region._whole_rows(batch)
        terms = region._terms(ends, whole)
        scales = collectives.vary({name: jnp.zeros((), jnp.float32) for name in terms})
        context = jax.tree.map(
            lambda x: x[0], region._context(jax.tree.map(lambda x: x[None], batch), rows[None], key, train=True)
        )
        x = ends.embed(batch, context)
        stacks = tuple(self._stack(c, x, context, scales) for c in chunks)
        self.found = self._ends(ends, x, batch, context, scales, stacks)
        return ()

    def _stack(self, chunks: Chunks, x: Any, context: Any, scales: Any) -> StackPieces:
        gradient, given, of_given, fetch = chunks.gradient, *self._weights(chunks)

        def forward(given: Any, x: Any, context: Any) -> Any:
            return gradient.forward(fetch(given), x, context)

        def backward(given: Any, saved: Any, context: Any, dy: Any, scales: Any) -> Any:
            return gradient.backward(fetch(given), saved, context, dy, scales)

        layer = self._piece(forward, (given, x, context), (of_given, self._x, None))
        saved = forward(given, x, context)[2]
        of_saved = layer.dims[len(layer.dims) - len(saved) :]
        args: Any
        dims: Any
        args, dims = (given, saved, context, x, scales), (of_given, of_saved, None, self._x, None)
        sizes = [_share(leaf, dim, self.tensor) for leaf, dim in zip(saved, of_saved, strict=True)]
        away = sum(size for size, leaf in zip(sizes, saved, strict=True) if gradient.moves(leaf))
        if not self.split:
            most = self._piece(backward, args, dims, sunk=len(given)).most
            return StackPieces(sum(sizes), away, 0, layer.most, most, 0)

        def first(given: Any, *args: Any) -> Any:
            return chunks.split.first(fetch(given), *args)

        def later(given: Any, *args: Any) -> Any:
            return chunks.split.later(fetch(given), *args)

        now = self._piece(first, args, dims)
        handed, skip = first(*args)[1], len(jax.tree.leaves(x))
        of_handed = now.dims[skip:]
        args, dims = (given, saved, context, scales, handed), (of_given, of_saved, None, None, of_handed)
        then = self._piece(later, args, dims, sunk=len(given))
        # What nobody reads, or is handed over twice, XLA does not keep.
        reads = then.reads[len(then.reads) - len(handed) :]
        alike = {
            (buffer, h.shape): _share(h, dim, self.tensor) if read else 0
            for buffer, h, dim, read in zip(now.buffers[skip:], handed, of_handed, reads, strict=True)
        }
        return StackPieces(sum(sizes), away, sum(alike.values()), layer.most, now.most, then.most)

    def _weights(self, chunks: Chunks) -> tuple[Any, dict[str, Dim], Any]:
        """-> what a layer's weights are made from, how it lies, and how they are made: gathered ones are there whole,
        others are cast where they are used."""
        weights = chunks.weights
        dims = {path: of_spec(tuple(p.tensor_spec)) for path, p in weights.placements.items()}
        if self.gathers:
            return weights.fetch(0), dims, lambda given: given
        stored = {path: None if d is None else d + 1 for path, d in dims.items()}
        return weights.params, stored, lambda params: replace(weights, params=params).fetch(0)

    def _ends(
        self, ends: Ends, x: Any, batch: Any, context: Any, scales: Any, stacks: tuple[StackPieces, ...]
    ) -> Pieces:
        of_outer = {path: of_spec(tuple(self.region.placements[path].tensor_spec)) for path in ends.outer}

        def with_outer(f: Any) -> Any:
            return lambda outer, *args: f(replace(ends, outer=outer), *args)

        embed = self._piece(with_outer(Ends.embed), (ends.outer, batch, context), (of_outer, None, None))
        args: Any
        dims: Any
        args, dims = (ends.outer, x, batch, context, scales), (of_outer, self._x, None, None, None)
        head = self._piece(with_outer(Ends.head_and_gradients), args, dims)
        args, dims = (ends.outer, batch, context, x), (of_outer, None, None, self._x)
        unembed = self._piece(with_outer(Ends.embed_gradients), args, dims)
        activation = sum(_share(a, self._x, self.tensor) for a in jax.tree.leaves(x))
        return Pieces(stacks, activation, embed.most, head.most, unembed.most)

    def _piece(self, f: Any, args: tuple[Any, ...], dims: tuple[Any, ...], sunk: int = 0) -> Piece:
        """`dims`: of each argument, by name, by leaf, or of all its leaves; `sunk`: how many results are."""
        flat: list[Dim] = []
        for arg, dim in zip(args, dims, strict=True):
            if isinstance(dim, dict):
                flat += [dim[name] for name in sorted(dim)]
            else:
                flat += dim if isinstance(dim, list) else [dim if x.ndim > 1 else None for x in jax.tree.leaves(arg)]
        return piece(jax.make_jaxpr(f)(*args), flat, self.tensor, self.platform, range(sunk))

    @property
    def _x(self) -> Dim:
        """The residual stream, if norms are split by positions."""
        return 1 if self.region.plan.sequence_sharded_norms and self.tensor > 1 else None


def _share(x: Any, dim: Dim, tensor: int) -> int:
    return nbytes(x) // (tensor if dim is not None and dim >= 0 else 1)
