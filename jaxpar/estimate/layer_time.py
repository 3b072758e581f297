"""How long one layer takes on one device for one microbatch: compute by kind, and communication inside the layer."""

from dataclasses import dataclass, fields

from jaxpar.estimate.layout import Layout, Remat
from jaxpar.estimate.links import Group, Links
from jaxpar.estimate.matmul import Rates
from jaxpar.estimate.system import System
from jaxpar.estimate.work import Layer, Matmul

# Elements read and written by a fused norm with its residual add, and by the two kernels apart; twice in a layer.
_STREAM = {True: 8, False: 10}
# Elements for each inner one of a gated activation, fused and not; of a plain one.
_GATED, _PLAIN = {True: 3, False: 5}, 2
# A backward reads the gradient besides what the forward read: three for two.
_BACKWARD = 1.5


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and microbatch. `recompute` is not in `backward`. `tensor`, `seq`, `expert`: communication
    that nothing hides, `contention` what the hidden part costs compute; of these four, `forward_exposed` falls into the
    forward. `weight`: of `backward`, what only the weights' gradients need."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    seq: float = 0.0
    expert: float = 0.0
    contention: float = 0.0
    forward_exposed: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "LayerTime") -> "LayerTime":
        return LayerTime(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, n: float) -> "LayerTime":
        return LayerTime(*(n * getattr(self, f.name) for f in fields(self)))

    @property
    def all_forward(self) -> float:
        """With the forward's part of the communication."""
        return self.forward + self.forward_exposed

    @property
    def all_backward(self) -> float:
        exposed = self.tensor + self.seq + self.expert + self.contention - self.forward_exposed
        return self.backward + self.recompute + exposed


@dataclass(frozen=True)
class _Kernels:
    """Seconds of a layer's parts: forward, backward."""

    matmul: tuple[float, float]
    attention: tuple[float, float]
    elementwise: tuple[float, float]


def layer_time(layer: Layer, layout: Layout, system: System, rates: Rates, links: Links, groups: dict) -> LayerTime:
    """`groups`: of the axes, by `place`."""
    kernels = _Kernels(
        _matmuls(layer, layout, rates, system), _attention(layer, layout, rates, system),
        _elementwise(layer, layout, rates, system),
    )  # fmt: skip
    forward = kernels.matmul[0] + kernels.attention[0] + kernels.elementwise[0]
    backward = kernels.matmul[1] + kernels.attention[1] + kernels.elementwise[1]
    again = _recompute(layer, layout, rates, kernels)
    tensor, hidden = _tensor(layer, layout, links, groups["tensor"], system)
    seq = _seq(layer, layout, links, groups["seq"], system, kernels.attention)
    expert = _expert(layer, layout, links, groups["expert"])
    twice = 2 + (layout.remat.layers if layout.remat.tensor else 0)
    contention = rates.constants.contention * hidden * twice
    return LayerTime(
        forward, backward, again, tensor * twice, sum(seq), 2 * expert, contention,
        tensor + seq[0] + expert + contention / twice, kernels.matmul[1] / 2,
    )  # fmt: skip


def _cut(matmul: Matmul, tensor: int) -> tuple[float, float]:
    """k and n on one device."""
    return (
        matmul.k / tensor if matmul.split == "k" else matmul.k,
        matmul.n / tensor if matmul.split == "n" else matmul.n,
    )


def _product(rates: Rates, matmul: Matmul, tokens: float, tensor: int, precision: str) -> tuple[float, float]:
    k, n = _cut(matmul, tensor)
    forward = rates.matmul(tokens, k, n, precision)
    # Of the input and of the weights; float8's conversions besides.
    backward = rates.matmul(tokens, n, k, precision) + rates.matmul(k, tokens, n, precision)
    if precision == "fp8":
        cast = rates.constants.fp8_bytes * tokens
        forward += rates.moved(cast * (0 if matmul.role == "key" else k) / matmul.count)
        backward += rates.moved(cast * n)
    return matmul.count * forward, matmul.count * backward


def _matmuls(layer: Layer, layout: Layout, rates: Rates, system: System) -> tuple[float, float]:
    forward = backward = 0.0
    for matmul in layer.matmuls:
        f, b = _product(rates, matmul, layout.tokens, layout.tensor, layout.precision)
        forward, backward = forward + f, backward + b
    if layer.experts:
        pairs = layout.tokens * layer.active * layout.expert_tensor / layout.tensor
        pairs *= layout.capacity or system.imbalance
        mine = layer.experts / layout.expert
        for matmul in layer.expert_matmuls:
            f, b = _product(rates, matmul, pairs / mine, layout.expert_tensor, layout.precision)
            forward, backward = forward + mine * f, backward + mine * b
    return forward, backward


def _attention(layer: Layer, layout: Layout, rates: Rates, system: System) -> tuple[float, float]:
    """Two products forward; backward four, and one of the forward's again where it is fused."""
    if not layer.heads:
        return 0.0, 0.0
    heads = layer.heads / layout.tensor
    if system.attention == "unfused":
        return _unfused(layer, layout, rates, system, heads)
    flops = 4.0 * layout.tokens * layout.length * heads * layer.head_dim / 2
    older = system.attention == "flash"
    return (
        rates.attention(flops, layer.head_dim, True, older),
        rates.attention(2.5 * flops, layer.head_dim, False, older),
    )


def _unfused(layer: Layer, layout: Layout, rates: Rates, system: System, heads: float) -> tuple[float, float]:
    """Scores lie in memory between the products. Rows of no multiple of 16 bytes cannot feed the tensor cores."""
    rows, keys = layout.tokens * heads, layout.length / (2 if system.skips_masked else 1)
    if layer.head_dim % 8 == 0:
        scores = rates.matmul(rows, layer.head_dim, keys, "bfloat16")
        values = rates.matmul(rows, keys, layer.head_dim, "bfloat16")
    else:
        scores = values = 2.0 * rows * layer.head_dim * keys / rates.peak("float32")
    forward, backward = (rates.moved(n * rows * keys) for n in system.score_bytes)
    return scores + values + forward, 2 * (scores + values) + backward


def _elementwise(layer: Layer, layout: Layout, rates: Rates, system: System) -> tuple[float, float]:
    width = 4 if layout.precision == "float32" else 2
    stream = _STREAM[system.fused] * layer.hidden / (layout.tensor if layout.split_norms else 1)
    inner = layer.inner * (_GATED[system.fused] if layer.gated else _PLAIN)
    turned = 2 * (layer.heads + 2 * layer.kv_heads) * layer.head_dim
    moved = layout.tokens * width * (stream + (inner + turned) / layout.tensor) * rates.constants.passes
    if layer.experts:
        # Sorted by expert and back.
        moved += layout.tokens * width * 4 * layer.active * layer.hidden * layout.expert_tensor / layout.tensor
    forward = rates.moved(moved)
    return forward, _BACKWARD * forward


def _recompute(layer: Layer, layout: Layout, rates: Rates, kernels: _Kernels) -> float:
    remat: Remat = layout.remat
    seconds = 0.0
    if remat.roles:
        everything = sum(m.weights for m in layer.matmuls) + layer.active * sum(m.weights for m in layer.expert_matmuls)
        named = sum(m.weights for m in layer.matmuls if m.role in remat.roles)
        named += layer.active * sum(m.weights for m in layer.expert_matmuls if m.role in remat.roles)
        seconds += kernels.matmul[0] * remat.share * named / everything
    if remat.attention:
        seconds += kernels.attention[0]
    if remat.elementwise:
        seconds += kernels.elementwise[0]
    return seconds * remat.layers


def _tensor(layer: Layer, layout: Layout, links: Links, group: Group, system: System) -> tuple[float, float]:
    """Seconds of one pass, forward or backward, that nothing hides, and that something does: an all-reduce after
    attention and one after the MLP, or a gather and a scatter around each, which is as long."""
    if group.size == 1:
        return 0.0, 0.0
    width = 4 if layout.precision == "float32" else 2
    one = links.reduce(layout.tokens * layer.hidden * width, group)
    seconds = one * ((1 if layer.heads else 0) + 1)
    hidden = links.constants.hidden_tensor * seconds if system.overlap_tensor else 0.0
    return seconds - hidden, hidden


def _seq(
    layer: Layer, layout: Layout, links: Links, group: Group, system: System, attention: tuple[float, float]
) -> tuple[float, float]:
    """Forward, backward: what of sequence parallelism's communication attention does not hide."""
    if group.size == 1 or not layer.heads:
        return 0.0, 0.0
    width = 4 if layout.precision == "float32" else 2
    row = layout.tokens * width * layer.head_dim / layout.tensor
    if layout.attention == "ulysses":
        seconds = 2 * links.exchange(row * (layer.heads + layer.kv_heads), group)
        return seconds, seconds
    keys = 2 * row * layer.kv_heads * layout.seq
    forward, backward = links.gather(keys, group), 2 * links.gather(keys, group)
    if layout.attention == "ring" and system.overlap_ring:
        return max(0.0, forward - attention[0]), max(0.0, backward - attention[1])
    return forward, backward


def _expert(layer: Layer, layout: Layout, links: Links, group: Group) -> float:
    """Forward or backward: to the experts and back."""
    if group.size == 1 or not layer.experts:
        return 0.0
    width = 4 if layout.precision == "float32" else 2
    pairs = layout.tokens * layer.active * layout.expert_tensor / layout.tensor
    return 2 * links.exchange(pairs * layer.hidden * width, group)
