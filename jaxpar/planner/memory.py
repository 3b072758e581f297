"""What a step takes of each device's memory, by part: arithmetic on sizes, for ranking many plans."""

from dataclasses import dataclass, fields
from math import ceil

import jax.numpy as jnp

from jaxpar.estimate.data_time import Held
from jaxpar.estimate.layout import Layout
from jaxpar.estimate.work import Layer, Work
from jaxpar.plan import Plan

# Elements of its residual stream that a layer keeps, if it recomputes nothing: both norms' inputs and results, and the
# sum between them; with `dots`, what enters it and what attention and MLP add.
_STREAM = {"none": 5, "dots": 3, "full": 1}
# Of its inner width: a gated one's two inputs, the activation and their product, a plain one's input and result.
_INNER = {True: {"none": 4, "dots": 2, "full": 0}, False: {"none": 2, "dots": 1, "full": 0}}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer, gradients: as ZeRO leaves them; gradients in float32.
      activations: what layers save for their backward, of all microbatches in flight.
      transient: the working set of a layer, of the head and its loss, and gathered parameters.
      batch: the rows of a step.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    transient: int
    batch: int

    @property
    def parts(self) -> dict[str, int]:
        """By name, in the order above."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory(work: Work, layout: Layout, plan: Plan, in_flight: int, state_bytes: float) -> Memory:
    """`in_flight`: chunks of layers whose activations a stage holds at once (`StepTime.in_flight`); `state_bytes`: of
    the optimizer's state for each parameter. The plan's mesh has no -1."""
    held, dtype = Held.by(work, layout), jnp.dtype(plan.param_dtype).itemsize
    shared = held.dense + held.outer / layout.pipe
    shards = layout.shard * layout.seq
    by_stage = [
        (shared + held.experts) if layout.zero < stage else shared / shards + held.experts * layout.expert / shards
        for stage in (1, 2, 3)
    ]
    state, gradients, parameters = by_stage
    width = jnp.dtype(plan.compute_dtype).itemsize
    chunks = 2 if plan.pipeline == "zero_bubble_v" and layout.pipe > 1 else layout.chunks
    layers = ceil(work.depth / (layout.pipe * chunks))
    saved = sum(_saved(layer, layout, plan.remat) * n for layer, n in work.layers) / work.depth
    offloads = set(plan.offload)
    return Memory(
        parameters=int(parameters * dtype),
        optimizer=0 if "optimizer" in offloads else int(state * state_bytes),
        gradients=int(gradients * 4),
        activations=0 if "activations" in offloads else int(saved * width * layers * max(1, in_flight)),
        transient=int(_transient(work, layout, held, width, layers)),
        batch=int(12 * layout.rows * layout.microbatches * layout.length / layout.seq),
    )


def _saved(layer: Layer, layout: Layout, remat: str) -> float:
    """Elements that one layer saves of one microbatch on one device."""
    policy = "full" if remat.startswith("named:") else remat
    stream = _STREAM[policy] * layer.hidden / (layout.tensor if layout.split_norms else 1)
    turned = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
    inner = layer.inner * _INNER[layer.gated][policy]
    sent = 2 * layer.active * layer.hidden * (layout.expert_tensor if policy == "none" else 0)
    attention = 0 if policy == "full" else turned
    if remat.startswith("named:"):
        named = remat.removeprefix("named:").split(",")
        attention = layer.heads * layer.head_dim if "attention" in named else 0
        inner = layer.inner if "mlp" in named else 0
    return layout.tokens * (stream + (attention + inner + sent) / layout.tensor)


def _transient(work: Work, layout: Layout, held: Held, width: int, layers: int) -> float:
    """The larger of a layer's backward and the head's, with the weights of two layers in the compute's dtype."""
    everything = max(_saved(layer, layout, "none") for layer, _ in work.layers)
    backward = 2 * width * everything
    logits = layout.tokens * work.vocab / layout.tensor / layout.pipe
    head = logits * (4 + width) + 4 * layout.tokens * work.hidden * width
    mine = (held.dense + held.experts) / max(1, work.depth / layout.pipe)
    gathered = 2 * mine * (width + 4) + held.outer / layout.pipe * width
    return max(backward, head) + gathered
