"""FLOPs of one instruction: matrix products and convolutions, in which a model's work is counted."""

import math
import re

from jaxpar.estimate.hlo_text import Computation, Instruction

_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
_CONVOLUTIONS = ("__cudnn$conv", "__onednn$convolution")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
# Bookkeeping calls that do no arithmetic worth a count.
_FREE = (
    *("Sharding", "SPMD", "annotate_device_placement", "MoveTo", "AllocateBuffer", "Pin", "TopK", "__cub$", "xla."),
    *("AssumeGatherIndicesInBound", "AsyncCollective"),
)


def flops(computation: Computation, instruction: Instruction) -> float:
    """Multiplications and additions (2 a pair) that this instruction itself does, callees not included.

    dot: 2 * elements of the result * elements contracted. Convolution: 2 * elements of the result * elements
    of the kernel per output feature (padding counts as work). Everything else 0.
    """
    if instruction.opcode in ("dot", "scaled-dot"):
        return _contraction(computation, instruction, instruction.numbers("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.base == "custom-call":
        return _custom_call(computation, instruction)
    return 0.0


def opaque_target(instruction: Instruction) -> str | None:
    """The target of a custom call whose work the text does not show (a hand-written kernel), else None."""
    target = call_target(instruction) if instruction.base == "custom-call" else ""
    known = (*_CUBLAS, *_CONVOLUTIONS, "__onednn$matmul", *_FREE)
    return target if target and not target.startswith(known) else None


def call_target(instruction: Instruction) -> str:
    found = _TARGET.search(instruction.attributes)
    return found.group(1) if found else ""


def _custom_call(computation: Computation, instruction: Instruction) -> float:
    target = call_target(instruction)
    if target.startswith(_CUBLAS):
        found = _CONTRACTING.search(instruction.attributes)
        dims = tuple(int(n) for n in re.findall(r"\d+", found.group(1))) if found else ()
        return _contraction(computation, instruction, dims)
    if target.startswith("__onednn$matmul"):
        return _batched_matmul(computation, instruction)
    if target.startswith(_CONVOLUTIONS):
        return _convolution(computation, instruction)
    return 0.0


def _contraction(computation: Computation, instruction: Instruction, dims: tuple[int, ...]) -> float:
    left = next(computation.operands(instruction)).leaves[0]
    return 2.0 * instruction.leaves[0].elements * math.prod(left.dims[d] for d in dims)


def _batched_matmul(computation: Computation, instruction: Instruction) -> float:
    """Transposed or not: left [B,M,K] times right [B,K,N] over result [B,M,N] leaves B * K * K."""
    left, right = (operand.leaves[0].elements for operand in list(computation.operands(instruction))[:2])
    out = instruction.leaves[0]
    batch = math.prod(out.dims[:-2])
    return 2.0 * out.elements * math.isqrt(left * right // (out.elements * batch))


def _convolution(computation: Computation, instruction: Instruction) -> float:
    kernel = list(computation.operands(instruction))[1].leaves[0]
    labels = _KERNEL_LABELS.search(instruction.attributes)
    if labels is None:
        return 0.0
    out_features = kernel.dims[labels.group(1).index("o")]
    return 2.0 * instruction.leaves[0].elements * kernel.elements / out_features
