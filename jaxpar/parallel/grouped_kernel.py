"""The products of `grouped` as Pallas kernels for Hopper: one launch where the plain loop takes one matmul a tile.

Rows lie in whole tiles of one group each, so that a block of rows needs one kernel, and the gradient of a kernel takes
whole tiles. A fixed number of blocks stays on the multiprocessors and walks over the result, as in jax's own
`ragged_dot_mgpu`, which is for rows that do not lie in tiles.

Letters: S rows of all tiles, E groups, D and F features.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import BFloat16, Int

from jaxpar.errors import PlanError

# Rows of a tile that a warpgroup multiplies, and the least number of features of a block.
LEAST = 64
# Multiprocessors of an H100 SXM. Another number is slower, not wrong.
_MULTIPROCESSORS = 132
_STEPS = 4


def check(rows: jax.ShapeDtypeStruct | Array, kernel: jax.ShapeDtypeStruct | Array) -> None:
    """Raises `PlanError` for what the kernels do not multiply."""
    mend = "set expert_kernel='loop'"
    if rows.dtype != jnp.bfloat16 or kernel.dtype != jnp.bfloat16:
        raise PlanError(
            f"expert_kernel='pallas' multiplies bfloat16, found rows of {rows.dtype} and kernels of {kernel.dtype}: "
            f"set precision='bfloat16', or {mend}"
        )
    if any(size % LEAST for size in kernel.shape[1:]):
        raise PlanError(
            f"expert_kernel='pallas' needs features in multiples of {LEAST} on each device, found kernels "
            f"{tuple(kernel.shape)}: change the model's sizes or `tensor`, or {mend}"
        )


def device_problems(device: jax.Device) -> list[str]:
    """Why this device cannot run the kernels."""
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and str(capability).startswith("9."):
        return []
    found = device.platform if capability is None else f"{device.platform} of compute capability {capability}"
    return [f"expert_kernel='pallas' needs Hopper GPUs (compute capability 9), found {found}: set expert_kernel='loop'"]


def multiply(
    x: BFloat16[Array, "S D"], kernel: BFloat16[Array, "E D F"], group: Int[Array, " tiles"], transposed: bool
) -> BFloat16[Array, "S F"]:
    """`x[s] @ kernel[group of s's tile]`, summed in float32; `transposed`: by `[E, F, D]` kernels."""
    tile, inner = x.shape[0] // group.shape[0], x.shape[1]
    features = kernel.shape[1 if transposed else 2]
    block = _block(features)

    def body(group_ref: Any, x_ref: Any, kernel_ref: Any, out_ref: Any) -> None:
        @plgpu.nd_loop((group.shape[0], features // block), collective_axes="sm")
        def _(loop: Any) -> None:
            i, j = loop.index

            def summed(acc: Any) -> Array:
                def step(_: Any, x_TD: Any, kernel_DF: Any) -> None:
                    plgpu.wgmma(acc, x_TD, kernel_DF.transpose((1, 0)) if transposed else kernel_DF)

                one = (block, LEAST) if transposed else (LEAST, block)
                specs = [
                    plgpu.BlockSpec((tile, LEAST), lambda k: (i, k), delay_release=1),
                    plgpu.BlockSpec(one, lambda k: (j, k) if transposed else (k, j), delay_release=1),
                ]
                run = plgpu.emit_pipeline(step, grid=(inner // LEAST,), in_specs=specs, max_concurrent_steps=_STEPS)
                run(x_ref, kernel_ref.at[group_ref[i]])
                return acc[...]

            place = (pl.ds(i * tile, tile), pl.ds(j * block, block))
            _store(pl.run_scoped(summed, plgpu.ACC((tile, block))), out_ref, place)

    return _launch(body, (x.shape[0], features))(group, x, kernel)


def kernel_gradient(
    x: BFloat16[Array, "S D"], dy: BFloat16[Array, "S F"], group: Int[Array, " tiles"], groups: int
) -> BFloat16[Array, "E D F"]:
    """Of each group `x.T @ dy`, summed in float32; zeros for one of no tiles. Tiles of a group lie side by side."""
    tile = x.shape[0] // group.shape[0]
    shape = (groups, x.shape[1], dy.shape[1])
    rows, columns = _block(shape[1]), _block(shape[2])
    count = jnp.sum(group[:, None] == jnp.arange(groups)[None, :], axis=0, dtype=jnp.int32)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    across = shape[2] // columns

    def body(first_ref: Any, count_ref: Any, x_ref: Any, dy_ref: Any, out_ref: Any) -> None:
        @plgpu.nd_loop((groups, shape[1] // rows * across), collective_axes="sm")
        def _(loop: Any) -> None:
            g, block = loop.index
            i, j = lax.div(block, jnp.int32(across)), lax.rem(block, jnp.int32(across))

            def summed(acc: Any) -> Array:
                def step(_: Any, x_TD: Any, dy_TF: Any) -> None:
                    plgpu.wgmma(acc, x_TD.transpose((1, 0)), dy_TF)

                start, many = first_ref[g], count_ref[g]

                @pl.when(many > 0)
                def _() -> None:
                    specs = [
                        plgpu.BlockSpec((tile, rows), lambda k: (start + k, i), delay_release=1),
                        plgpu.BlockSpec((tile, columns), lambda k: (start + k, j), delay_release=1),
                    ]
                    plgpu.emit_pipeline(step, grid=(many,), in_specs=specs, max_concurrent_steps=_STEPS)(x_ref, dy_ref)

                return acc[...]

            place = (g, pl.ds(i * rows, rows), pl.ds(j * columns, columns))
            _store(pl.run_scoped(summed, plgpu.ACC((rows, columns))), out_ref, place)

    return _launch(body, shape)(first, count, x, dy)


def _store(found: Array, out_ref: Any, place: Any) -> None:
    def store(held: Any) -> None:
        held[...] = found.astype(held.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(held, out_ref.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM(found.shape, jnp.bfloat16))


def _launch(body: Any, shape: tuple[int, ...]) -> Any:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        grid=(_MULTIPROCESSORS,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _block(features: int) -> int:
    return 2 * LEAST if features % (2 * LEAST) == 0 else LEAST
