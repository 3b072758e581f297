"""Options that jaxpar's programs are compiled with, by platform."""

Options = dict[str, int | bool | str]


def init_options(platform: str) -> Options:
    """Those under which the same random numbers come out of every sharding, to the last bit.

    On CPU, LLVM contracts a product and a sum into one rounding here and not there, as it vectorises each shape.
    """
    return {"xla_backend_optimization_level": 0} if platform == "cpu" else {}


def step_options(platform: str) -> Options:
    """Those that let several collectives be under way at once, so that a layer's hide behind its matmuls.

    A layer gathers six kernels or so while it sends the last one's gradients: with 4 at once a third of ZeRO-3's
    gathers wait in the open (docs/design.md).
    """
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": 8} if platform in ("cuda", "gpu") else {}
