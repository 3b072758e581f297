"""Little programs whose communication is known, and their meshes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

OUTER, INNER = 3, 5
ROWS, WIDTH = 64, 32  # 16 rows on a device of data=4
SHARD_BYTES = ROWS // 4 * WIDTH * 4
WHOLE_BYTES = ROWS * WIDTH * 4
DOT_FLOPS = 2 * (ROWS // 4) * WIDTH * WIDTH

# What `nested` executes on data=4, tensor=2. Each kind's bytes are those of its larger side.
NESTED_TOTALS = {
    (("data",), "all-gather"): (OUTER * INNER, OUTER * INNER * WHOLE_BYTES),
    (("data",), "reduce-scatter"): (OUTER * INNER, OUTER * INNER * WHOLE_BYTES),
    (("tensor",), "all-reduce"): (OUTER * INNER, OUTER * INNER * SHARD_BYTES),
    (("data",), "collective-permute"): (OUTER, OUTER * SHARD_BYTES),
    (("tensor",), "all-to-all"): (OUTER, OUTER * SHARD_BYTES),
    (("data", "tensor"), "all-reduce"): (1, 4),
}


def mesh_of(devices, **axes: int) -> Mesh:
    """A mesh of the first devices, all axes automatic."""
    shape = tuple(axes.values())
    grid = np.array(devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def lower(function, mesh: Mesh, arguments, in_specs, out_specs, **jit) -> jax.stages.Lowered:
    """`function` as a shard_map over every axis; `arguments` are shapes of the global arrays."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **jit).lower(*placed(mesh, arguments, in_specs))


def placed(mesh: Mesh, arguments, specs) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(arguments, specs, strict=True)
    ]


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def nested(mesh: Mesh) -> jax.stages.Lowered:
    """Every kind of collective, inside a scan of INNER inside a scan of OUTER; one dot an inner iteration."""

    def inner(x, w):
        x = jnp.tanh(x @ w)
        x = lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True)
        return jnp.tanh(lax.psum(x, "tensor")), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, weights)
        x = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
        halves = x.reshape(2, -1, WIDTH)
        return lax.all_to_all(halves, "tensor", 0, 0, tiled=True).reshape(x.shape), None

    def program(x, w):
        nonlocal weights
        weights = w
        x, _ = lax.scan(outer, x, length=OUTER)
        return x, lax.psum(x.sum(), ("data", "tensor"))

    weights = None
    arguments = array(ROWS, WIDTH), array(INNER, WIDTH, WIDTH)
    return lower(program, mesh, arguments, (P("data"), P()), (P("data"), P()))
