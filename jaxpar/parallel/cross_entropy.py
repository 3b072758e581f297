"""Softmax cross-entropy of a vocabulary-sharded head, in float32, chunk by chunk: never all logits at once.

Letters: N tokens, D embed, V vocabulary, C tokens of a chunk.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxpar.axis_rules import next_multiple
from jaxpar.collectives import axis_size, constrain, vary

_MASKED = -1e30


def cross_entropy(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    *,
    label_smoothing: float = 0.0,
    chunk: int = 2048,
) -> Float[Array, ""]:
    """`sum(weights * -log softmax(x @ kernel.T)[targets])`, float32: a total, never a mean.

    `kernel` has the vocabulary first (a tied embedding table as it is) and may be split over `tensor` there. Logits of
    at most `chunk` tokens live at a time; with a gradient, the unit gradients are made in the same pass, so that no
    logit is computed twice. `label_smoothing` spreads this share of each target evenly over the whole vocabulary
    (Szegedy et al., 2016). A target outside the vocabulary contributes `log sum exp` alone: check ids before.
    """
    return _total(_Options(targets.size, chunk, label_smoothing), *_by_token(x, kernel, targets, weights))


def cross_entropy_and_z_loss(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    *,
    label_smoothing: float = 0.0,
    chunk: int = 2048,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy`, and `sum(weights * (log sum exp)**2)`, which keeps logits small (Chowdhery et al., PaLM, 2022).

    Two totals for two terms of the objective. The gradient computes the logits again: how the two weigh is not known
    before, and unit gradients of both would take a matmul and a table more.
    """
    return _totals(_Options(targets.size, chunk, label_smoothing), *_by_token(x, kernel, targets, weights))


@dataclass(frozen=True)
class _Options:
    tokens: int
    chunk: int
    smoothing: float


def _by_token(x, kernel, targets, weights):  # type: ignore[no-untyped-def]
    return x.reshape(targets.size, -1), kernel, targets.reshape(-1), weights.reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(options, *arrays):  # type: ignore[no-untyped-def]
    return _forward(options, *arrays)[0]


def _total_fwd(options, *arrays):  # type: ignore[no-untyped-def]
    total, gradients = _gradients(options, *arrays, None)
    x_ND, kernel_VD, _, _ = arrays
    return total, (*gradients, x_ND[:0], kernel_VD[:0])


def _total_bwd(options, saved, g):  # type: ignore[no-untyped-def]
    dx_ND, dkernel_VD, dweights_N, x, kernel = saved
    return (g * dx_ND).astype(x.dtype), (g * dkernel_VD).astype(kernel.dtype), None, g * dweights_N


_total.defvjp(_total_fwd, _total_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _totals(options, *arrays):  # type: ignore[no-untyped-def]
    return _forward(options, *arrays)


def _totals_fwd(options, *arrays):  # type: ignore[no-untyped-def]
    return _forward(options, *arrays), arrays


def _totals_bwd(options, arrays, g):  # type: ignore[no-untyped-def]
    x_ND, kernel_VD, _, _ = arrays
    dx_ND, dkernel_VD, dweights_N = _gradients(options, *arrays, g)[1]
    return dx_ND.astype(x_ND.dtype), dkernel_VD.astype(kernel_VD.dtype), None, dweights_N


_totals.defvjp(_totals_fwd, _totals_bwd)


def _forward(options, x_ND, kernel_VD, targets_N, weights_N):  # type: ignore[no-untyped-def]
    """-> the totals of cross-entropy and z-loss; XLA leaves out the one that nobody reads."""
    table, vocab = _padded_table(kernel_VD, x_ND.dtype), kernel_VD.shape[0]

    def body(totals, chunk):  # type: ignore[no-untyped-def]
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, vocab)
        lse_C = _lse(logits_CV)[0]
        losses_C = lse_C - _expected(logits_CV, targets_C, vocab, options.smoothing)
        return (totals[0] + jnp.sum(weights_C * losses_C), totals[1] + jnp.sum(weights_C * lse_C**2)), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(body, vary((zero, zero)), _chunks(options, x_ND, targets_N, weights_N))[0]


def _gradients(options, x_ND, kernel_VD, targets_N, weights_N, g):  # type: ignore[no-untyped-def]
    """-> the total of cross-entropy, and the gradients of x, kernel and weights, float32.

    `g`: how much cross-entropy and z-loss count; None: the unit gradient of cross-entropy alone.
    """
    table, vocab = _padded_table(kernel_VD, x_ND.dtype), kernel_VD.shape[0]

    def body(carry, chunk):  # type: ignore[no-untyped-def]
        total, dkernel_VD = carry
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, vocab)
        lse_C, softmax_CV = _lse(logits_CV)
        losses_C = dweights_C = lse_C - _expected(logits_CV, targets_C, vocab, options.smoothing)
        dlogits_CV = softmax_CV - _share(logits_CV, targets_C, vocab, options.smoothing)
        if g is not None:
            dlogits_CV = g[0] * dlogits_CV + 2 * g[1] * lse_C[:, None] * softmax_CV
            dweights_C = g[0] * losses_C + g[1] * lse_C**2
        dlogits_CV = constrain((weights_C[:, None] * dlogits_CV).astype(x_CD.dtype), P(None, "tensor"))
        dx_CD = _dot("cv,vd->cd", dlogits_CV, table)
        dkernel_VD = dkernel_VD + _dot("cv,cd->vd", dlogits_CV, x_CD)
        dkernel_VD = constrain(dkernel_VD, P("tensor", None))
        return (total + jnp.sum(weights_C * losses_C), dkernel_VD), (constrain(dx_CD, P(None, None)), dweights_C)

    start = vary((jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)))
    (total, dkernel), (dx, dweights) = lax.scan(body, start, _chunks(options, x_ND, targets_N, weights_N))
    dx_ND, dweights_N = dx.reshape(-1, x_ND.shape[1])[: options.tokens], dweights.reshape(-1)[: options.tokens]
    return total, (dx_ND, dkernel[:vocab], dweights_N)


def _chunks(options, *arrays):  # type: ignore[no-untyped-def]
    """Equal chunks of at most `chunk` tokens; what fills up the last one has weight 0."""
    tokens = options.tokens
    count = -(-tokens // options.chunk)
    size = -(-tokens // count)

    def cut(x):  # type: ignore[no-untyped-def]
        fill = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, fill).reshape(count, size, *x.shape[1:])

    return tuple(cut(x) for x in arrays)


def _padded_table(kernel_VD, dtype):  # type: ignore[no-untyped-def]
    """In the compute dtype, and of a size that divides over `tensor`."""
    vocab = kernel_VD.shape[0]
    padded = jnp.pad(kernel_VD, [(0, next_multiple(vocab, axis_size("tensor")) - vocab), (0, 0)])
    return constrain(padded.astype(dtype), P("tensor", None))


def _logits(x_CD, table_VD, vocab: int):  # type: ignore[no-untyped-def]
    logits_CV = constrain(_dot("cd,vd->cv", x_CD, table_VD), P(None, "tensor"))
    if table_VD.shape[0] == vocab:
        return logits_CV
    return jnp.where(_ids(logits_CV) < vocab, logits_CV, _MASKED)


def _lse(logits_CV):  # type: ignore[no-untyped-def]
    """-> log sum exp [C], softmax [C, V]."""
    top_C1 = jnp.max(logits_CV, axis=1, keepdims=True)
    exp_CV = jnp.exp(logits_CV - top_C1)
    sum_C1 = jnp.sum(exp_CV, axis=1, keepdims=True)
    return (top_C1 + jnp.log(sum_C1))[:, 0], exp_CV / sum_C1


def _expected(logits_CV, targets_C, vocab: int, smoothing: float):  # type: ignore[no-untyped-def]
    """The mean logit under the target distribution [C]."""
    at_target_C = jnp.sum(jnp.where(_ids(logits_CV) == targets_C[:, None], logits_CV, 0.0), axis=1)
    if smoothing == 0.0:
        return at_target_C
    mean_C = jnp.sum(jnp.where(_ids(logits_CV) < vocab, logits_CV, 0.0), axis=1) / vocab
    return (1 - smoothing) * at_target_C + smoothing * mean_C


def _share(logits_CV, targets_C, vocab: int, smoothing: float):  # type: ignore[no-untyped-def]
    """The target distribution [C, V]: nothing of it falls on what pads the vocabulary."""
    one_hot_CV = _ids(logits_CV) == targets_C[:, None]
    if smoothing == 0.0:
        return one_hot_CV
    return (1 - smoothing) * one_hot_CV + smoothing / vocab * (_ids(logits_CV) < vocab)


def _ids(logits_CV):  # type: ignore[no-untyped-def]
    return lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)


def _dot(spec: str, a, b):  # type: ignore[no-untyped-def]
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
