"""Softmax cross-entropy of a vocabulary-sharded head, in float32, chunk by chunk: never all logits at once.

Letters: N tokens, D embed, V vocabulary, C tokens of a chunk.
"""

import functools

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
    chunk: int = 2048,
) -> Float[Array, ""]:
    """`sum(weights * -log softmax(x @ kernel.T)[targets])`, float32: a total, never a mean.

    `kernel` has the vocabulary first (a tied embedding table as it is) and may be split over `tensor` there. Logits of
    at most `chunk` tokens live at a time; with a gradient, the unit gradients are made in the same pass, so that no
    logit is computed twice. A target outside the vocabulary contributes `log sum exp` alone: check ids before.
    """
    tokens = targets.size
    return _total((tokens, chunk), x.reshape(tokens, -1), kernel, targets.reshape(tokens), weights.reshape(tokens))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(sizes, x_ND, kernel_VD, targets_N, weights_N):  # type: ignore[no-untyped-def]
    table = _padded_table(kernel_VD, x_ND.dtype)

    def body(total, chunk):  # type: ignore[no-untyped-def]
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, kernel_VD.shape[0])
        return total + jnp.sum(weights_C * (_lse(logits_CV)[0] - _at_target(logits_CV, targets_C))), None

    zero = vary(jnp.zeros((), jnp.float32))
    return lax.scan(body, zero, _chunks(sizes, x_ND, targets_N, weights_N))[0]


def _total_fwd(sizes, x_ND, kernel_VD, targets_N, weights_N):  # type: ignore[no-untyped-def]
    table = _padded_table(kernel_VD, x_ND.dtype)

    def body(carry, chunk):  # type: ignore[no-untyped-def]
        total, dkernel_VD = carry
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, kernel_VD.shape[0])
        lse_C, exp_CV = _lse(logits_CV)
        losses_C = lse_C - _at_target(logits_CV, targets_C)
        dlogits_CV = exp_CV - (_ids(logits_CV) == targets_C[:, None])
        dlogits_CV = constrain((weights_C[:, None] * dlogits_CV).astype(x_CD.dtype), P(None, "tensor"))
        dx_CD = _dot("cv,vd->cd", dlogits_CV, table)
        dkernel_VD = dkernel_VD + _dot("cv,cd->vd", dlogits_CV, x_CD)
        dkernel_VD = constrain(dkernel_VD, P("tensor", None))
        return (total + jnp.sum(weights_C * losses_C), dkernel_VD), (constrain(dx_CD, P(None, None)), losses_C)

    start = vary((jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)))
    (total, dkernel), (dx, losses) = lax.scan(body, start, _chunks(sizes, x_ND, targets_N, weights_N))
    dx_ND = dx.reshape(-1, x_ND.shape[1])[: sizes[0]]
    dkernel_VD = dkernel[: kernel_VD.shape[0]]
    return total, (dx_ND, dkernel_VD, losses.reshape(-1)[: sizes[0]], x_ND[:0], kernel_VD[:0])


def _total_bwd(sizes, saved, g):  # type: ignore[no-untyped-def]
    dx_ND, dkernel_VD, losses_N, x, kernel = saved
    return (g * dx_ND).astype(x.dtype), (g * dkernel_VD).astype(kernel.dtype), None, g * losses_N


_total.defvjp(_total_fwd, _total_bwd)


def _chunks(sizes, *arrays):  # type: ignore[no-untyped-def]
    """Equal chunks of at most `chunk` tokens; what fills up the last one has weight 0."""
    tokens, chunk = sizes
    count = -(-tokens // chunk)
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


def _at_target(logits_CV, targets_C):  # type: ignore[no-untyped-def]
    return jnp.sum(jnp.where(_ids(logits_CV) == targets_C[:, None], logits_CV, 0.0), axis=1)


def _ids(logits_CV):  # type: ignore[no-untyped-def]
    return lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)


def _dot(spec: str, a, b):  # type: ignore[no-untyped-def]
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
