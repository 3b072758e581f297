"""How a training system runs a layout: which kernels it has, and what communication it hides behind compute.

These are facts about software, not numbers to fit: `JAXPAR` is this project's own executor; the others, for comparing
with published runs, are in `experiments/bench/published.py`.
"""

from dataclasses import dataclass
from typing import Literal

# `unfused`: scores go to memory between two batched products. `flash`: fused, written for Ampere's instructions.
# `tuned`: fused, written for the device's own.
Kernel = Literal["unfused", "flash", "tuned"]


@dataclass(frozen=True)
class System:
    """What software does and does not.

    Attributes:
      attention: see `Kernel`.
      score_bytes: for `unfused`, bytes that softmax and dropout move for each score, forward and backward, besides what
        the products do; `skips_masked`: scores that the causal mask hides are not computed (fused kernels never do).
      fused: neighbouring elementwise kernels are one.
      overlap_tensor: tensor parallelism's collectives lie over matrix products, in parts.
      overlap_ring: keys of sequence parallelism are on their way during attention.
      overlap_gradients: ZeRO 0 and 1 reduce and gather while layers compute; else after the last of them.
      overlap_shards: the same for what ZeRO 2 and 3 move in every microbatch.
      overlap_pipe: a stage computes while its messages travel.
      lockstep: all stages play one schedule tick by tick, and share the head. Else each goes on as its input arrives,
        and the last has the head.
      gather_bytes: of a parameter on its way to where it is used; `update_bytes`: to where ZeRO-1 holds copies;
        `reduce_bytes`: of a gradient.
      regather: ZeRO-3 gathers a layer again for its backward, else it is kept from the forward on.
      accumulate_bytes: moved for each element of a gradient that a further microbatch adds to, beyond what the matrix
        product that makes it writes.
      gather_outer_once: ZeRO-3 gathers embedding and head once a step, not once a microbatch.
      imbalance: how many times its equal share the fullest expert takes, where routing is dropless.
    """

    name: str
    attention: Kernel = "tuned"
    score_bytes: tuple[int, int] = (9, 11)
    skips_masked: bool = False
    fused: bool = True
    overlap_tensor: bool = False
    overlap_ring: bool = True
    overlap_gradients: bool = True
    overlap_shards: bool = True
    overlap_pipe: bool = True
    lockstep: bool = False
    gather_bytes: int = 2
    update_bytes: int = 2
    reduce_bytes: int = 4
    accumulate_bytes: int = 0
    gather_outer_once: bool = False
    regather: bool = True
    imbalance: float = 1.0


# What docs/design.md says of it. Attention in plain JAX: float32 scores of a block are written and read between its
# products, none for dropout, and blocks that the mask hides are not visited. ZeRO-3's gathers and scatters lie over the
# neighbouring layers, gradients of ZeRO 0 and 1 wait for the last microbatch, messages of a pipeline lie over compute.
# A gradient is read in 16 bits and its float32 sum read and written, where its place is whole: ZeRO 2 and 3 sum shards.
# XLA does not cut tensor parallelism's collectives in parts. Text is never routed evenly: a fifth above the mean.
JAXPAR = System(
    "jaxpar",
    attention="unfused",
    score_bytes=(8, 12),
    skips_masked=True,
    overlap_gradients=False,
    lockstep=True,
    update_bytes=4,
    accumulate_bytes=10,
    gather_outer_once=True,
    imbalance=1.2,
)
