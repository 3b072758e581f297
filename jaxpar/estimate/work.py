"""What a model is to the estimator: the matrix products, attention and memory traffic of its layers, and its sizes.

Computed once for a model; an estimate only reads it. All counts are of one layer and one token, before any split.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Matmul:
    """`[tokens, k] x [k, n]`, `count` times. `split`: which side `tensor` cuts, `n` (column) or `k` (row); None: it is
    replicated. `role`: `query`, `key`, `out`, `up`, `down` or `other`, for what a remat policy names."""

    role: str
    k: int
    n: int
    split: str | None
    count: int = 1

    @property
    def weights(self) -> int:
        return self.k * self.n * self.count


@dataclass(frozen=True)
class Layer:
    """One kind of layer. `heads`, `kv_heads`, `head_dim` of its attention (0 heads: none). `hidden`: elements of the
    residual stream. `inner`: elements that its activation function writes for a token. `gated`: that it multiplies two
    inputs. `experts`: how many it has (0: dense), of which each token takes `active`."""

    matmuls: tuple[Matmul, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    gated: bool
    experts: int = 0
    active: int = 0
    expert_matmuls: tuple[Matmul, ...] = ()

    @cached_property
    def dense_parameters(self) -> int:
        return sum(m.weights for m in self.matmuls) + 2 * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts together."""
        return self.experts * sum(m.weights for m in self.expert_matmuls)


@dataclass(frozen=True)
class Work:
    """`layers`: (layer, how many), in depth order. `vocab`: rows of the head's matrix. `outer_parameters`: of all that
    lies outside the layers, one tied table counted once."""

    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    vocab: int
    outer_parameters: int

    @cached_property
    def depth(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def parameters(self) -> int:
        inner = sum((layer.dense_parameters + layer.expert_parameters) * n for layer, n in self.layers)
        return inner + self.outer_parameters

    def flops_per_token(self, length: int, causal: bool = True) -> float:
        """Of forward and backward, 6 N + 6 H h T for each layer with attention, halved by a causal mask, none of it
        recomputed."""
        weights = float(self.vocab * self.hidden)
        for layer, n in self.layers:
            active = layer.active * sum(m.weights for m in layer.expert_matmuls)
            attention = layer.heads * layer.head_dim * length * (1.0 if causal else 2.0)
            weights += n * (sum(m.weights for m in layer.matmuls) + active + attention)
        return 6.0 * weights


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    gated: bool,
    vocab: int,
    tied: bool = False,
    positions: int = 0,
    experts: int = 0,
    active: int = 0,
    expert_mlp: int = 0,
    dense_layers: int = 0,
) -> Work:
    """A decoder by its sizes. `mlp`: the dense MLP's inner size; with `experts`, all but the first `dense_layers` have
    `experts` of inner size `expert_mlp` in its place. `positions`: learned ones."""
    attention = (
        Matmul("query", hidden, heads * head_dim, "n"),
        Matmul("key", hidden, kv_heads * head_dim, "n", 2),
        Matmul("out", heads * head_dim, hidden, "k"),
    )
    dense = Layer(attention + _mlp(hidden, mlp, gated), hidden, heads, kv_heads, head_dim, mlp, gated)
    stacks: tuple[tuple[Layer, int], ...] = ((dense, layers),)
    if experts:
        router = Matmul("other", hidden, experts, None)
        expert = _mlp(hidden, expert_mlp, gated)
        inner = active * expert_mlp
        sparse = Layer(
            (*attention, router), hidden, heads, kv_heads, head_dim, inner, gated, experts, active, expert
        )  # fmt: skip
        stacks = ((dense, dense_layers), (sparse, layers - dense_layers))
    outer = vocab * hidden * (1 if tied else 2) + positions * hidden
    return Work(tuple((layer, n) for layer, n in stacks if n), hidden, vocab, outer)


def _mlp(hidden: int, inner: int, gated: bool) -> tuple[Matmul, ...]:
    return (Matmul("up", hidden, inner, "n", 2 if gated else 1), Matmul("down", inner, hidden, "k"))
