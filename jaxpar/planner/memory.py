"""What a step takes of each device's memory, by part: arithmetic on sizes, for ranking many plans."""

from dataclasses import dataclass, fields
from math import ceil

import jax.numpy as jnp

from jaxpar.estimate.data_time import Held
from jaxpar.estimate.layout import Layout
from jaxpar.estimate.work import Layer, Work
from jaxpar.plan import Plan

# What XLA's programs of models/llama.py and gpt.py keep of a layer in bfloat16, by remat policy, in bytes: for each
# element of the residual stream, those that split norms split and those that they do not; for each element of queries,
# keys, values and attention's result; for each inner one of a gated MLP and of a plain one.
_STREAM = {"none": (16.25, 6.25), "dots": (2.25, 2.0), "full": (2.25, 0.0)}
_TURNED = {"none": 1.8, "dots": 1.8, "full": 0.0}
_INNER = {True: {"none": 11.6, "dots": 3.6, "full": 0.0}, False: {"none": 9.7, "dots": 1.7, "full": 0.0}}
# In float32, as many times as much: half of what `none` keeps is in float32 anyway.
_WIDER = {"none": 1.4, "dots": 2.0, "full": 2.0}
# A layer's backward needs this part of what it would keep without remat, besides what it does keep.
_WORKING = {"none": 0.35, "dots": 0.5, "full": 0.75}
# Between a B and its W: what the weights' gradients are made of, in the same way; without remat most of it is there.
_PENDING = (3.7, 2.0, {True: 9.2, False: 7.0})
_PENDING_SHARE = {"none": 0.4, "dots": 1.0, "full": 1.0}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer, gradients: as ZeRO leaves them; gradients in float32.
      activations: what layers save for their backward, of all microbatches in flight.
      pending: what waits for the weights' part of a split backward.
      transient: the working set of a layer, of the head and its loss, and gathered parameters.
      batch: the rows of a step.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    pending: int
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
    chunks = 2 if plan.pipeline == "zero_bubble_v" and layout.pipe > 1 else layout.chunks
    layers = ceil(work.depth / (layout.pipe * chunks))
    saved = sum(_saved(layer, layout, plan.remat, plan.precision) * n for layer, n in work.layers) / work.depth
    waiting = sum(_pending(layer, layout, plan) * n for layer, n in work.layers) / work.depth
    offloads = set(plan.offload)
    return Memory(
        parameters=int(parameters * dtype),
        optimizer=0 if "optimizer" in offloads else int(state * state_bytes),
        gradients=int(gradients * 4),
        activations=0 if "activations" in offloads else int(saved * layers * max(1, in_flight)),
        pending=int(waiting * layers * pending_chunks(plan, layout.pipe)),
        transient=int(_transient(work, layout, plan, held)),
        batch=int(12 * layout.rows * layout.microbatches * layout.length / layout.seq),
    )


def _saved(layer: Layer, layout: Layout, remat: str, precision: str) -> float:
    """Bytes that one layer saves of one microbatch on one device."""
    policy = "full" if remat.startswith("named:") else remat
    split, whole = _STREAM[policy]
    stream = layer.hidden * (split / (layout.tensor if layout.split_norms else 1) + whole)
    turned = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim * _TURNED[policy]
    inner = layer.inner * _INNER[layer.gated][policy]
    if remat.startswith("named:"):
        named = remat.removeprefix("named:").split(",")
        turned = 2 * layer.heads * layer.head_dim if "attention" in named else 0
        turned += 2 * (layer.heads + 2 * layer.kv_heads) * layer.head_dim if "qkv" in named else 0
        stream += 2 * layer.hidden / (layout.tensor if layout.split_norms else 1) if "out" in named else 0
        inner = 2 * layer.inner if "mlp" in named else 0
    if policy == "none":  # what goes to experts, and comes back
        turned += 4 * layer.active * layer.hidden * layout.expert_tensor
    wider = _WIDER[policy] if precision == "float32" else 1.0
    return layout.tokens * (stream + (turned + inner) / layout.tensor) * wider


def _pending(layer: Layer, layout: Layout, plan: Plan) -> float:
    """Bytes of one layer and microbatch between its B and its W."""
    policy = plan.remat if plan.remat in _PENDING_SHARE else "full"
    stream, turned, inner = _PENDING
    attention = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim * turned
    split = (attention + layer.inner * inner[layer.gated]) / layout.tensor
    wider = 2.0 if plan.precision == "float32" else 1.0
    return layout.tokens * (layer.hidden * stream + split) * _PENDING_SHARE[policy] * wider


def pending_chunks(plan: Plan, stages: int) -> int:
    """For how many chunks of a stage there is room between B and W (`Schedule.peak_pending`, and one in the V)."""
    if stages == 1 or not plan.pipeline.startswith("zero_bubble"):
        return 0
    if plan.pipeline == "zero_bubble_v":
        return min(plan.microbatches, stages if plan.fill else ceil(stages / 2)) + 1
    return min(plan.microbatches, 2 * stages - 1 if plan.fill else stages)


def _transient(work: Work, layout: Layout, plan: Plan, held: Held) -> float:
    """The larger of a layer's backward and the head's; what is gathered and cast of the weights of two layers."""
    width = jnp.dtype(plan.compute_dtype).itemsize
    everything = max(_saved(layer, layout, "none", plan.precision) for layer, _ in work.layers)
    backward = _WORKING.get(plan.remat, _WORKING["full"]) * everything
    logits = layout.tokens * work.vocab / layout.tensor / layout.pipe
    head = logits * (4 + width) + 4 * layout.tokens * work.hidden * width
    mine = (held.dense + held.experts) / max(1, work.depth / layout.pipe)
    gathered = 2 * mine * (width + 4) + held.outer / layout.pipe * width
    return max(backward, head) + gathered
