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
from jaxpar.collectives import axis_index, axis_size, constrain, live, psum, vary
from jaxpar.parallel import vocabulary

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
    options, kernel, targets = _options(kernel, targets, chunk, label_smoothing)
    return _total(options, *_by_token(x, kernel, targets, weights))


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
    options, kernel, targets = _options(kernel, targets, chunk, label_smoothing)
    return _totals(options, *_by_token(x, kernel, targets, weights))


@dataclass(frozen=True)
class _Options:
    """`vocab`: rows of the whole table; `shared`: each stage of a pipeline has a slice of it, padded at the end."""

    tokens: int
    chunk: int
    smoothing: float
    vocab: int
    shared: bool


def _options(kernel, targets, chunk: int, smoothing: float):  # type: ignore[no-untyped-def]
    """-> options, kernel, and the targets counted from where this stage's slice starts."""
    kernel, vocab, start = vocabulary.slice_of(kernel)
    options = _Options(targets.size, chunk, smoothing, vocab, start is not None)
    return options, kernel, targets if start is None else targets - start


def _by_token(x, kernel, targets, weights):  # type: ignore[no-untyped-def]
    # Weights that the model makes itself are the same everywhere; their gradients are not.
    x, weights = vary((x, weights))
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
    table, rows = _padded_table(kernel_VD, x_ND.dtype), _rows(options, kernel_VD)

    def body(totals, chunk):  # type: ignore[no-untyped-def]
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, rows)
        lse_C, expected_C, _ = _statistics(options, logits_CV, targets_C, rows)
        losses_C = lse_C - expected_C
        return vary((totals[0] + jnp.sum(weights_C * losses_C), totals[1] + jnp.sum(weights_C * lse_C**2))), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(body, vary((zero, zero)), _chunks(options, x_ND, targets_N, weights_N))[0]


def _gradients(options, x_ND, kernel_VD, targets_N, weights_N, g):  # type: ignore[no-untyped-def]
    """-> the total of cross-entropy, and the gradients of x, kernel and weights, float32.

    `g`: how much cross-entropy and z-loss count; None: the unit gradient of cross-entropy alone.
    """
    table, rows = _padded_table(kernel_VD, x_ND.dtype), _rows(options, kernel_VD)

    def body(carry, chunk):  # type: ignore[no-untyped-def]
        total, dkernel_VD = carry
        x_CD, targets_C, weights_C = chunk
        logits_CV = _logits(x_CD, table, rows)
        lse_C, expected_C, softmax_CV = _statistics(options, logits_CV, targets_C, rows)
        losses_C = dweights_C = lse_C - expected_C
        dlogits_CV = softmax_CV - _share(options, logits_CV, targets_C, rows)
        if g is not None:
            dlogits_CV = g[0] * dlogits_CV + 2 * g[1] * lse_C[:, None] * softmax_CV
            dweights_C = g[0] * losses_C + g[1] * lse_C**2
        dlogits_CV = constrain((weights_C[:, None] * dlogits_CV).astype(x_CD.dtype), P(None, "tensor"))
        dx_CD = _dot("cv,vd->cd", dlogits_CV, table)
        dkernel_VD = dkernel_VD + _dot("cv,cd->vd", dlogits_CV, x_CD)
        dkernel_VD = constrain(dkernel_VD, P("tensor", None))
        total = total + jnp.sum(weights_C * losses_C)
        return vary((total, dkernel_VD)), vary((constrain(dx_CD, P(None, None)), dweights_C))

    start = vary((jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)))
    (total, dkernel), (dx, dweights) = lax.scan(body, start, _chunks(options, x_ND, targets_N, weights_N))
    dx_ND, dweights_N = dx.reshape(-1, x_ND.shape[1])[: options.tokens], dweights.reshape(-1)[: options.tokens]
    if options.shared:
        dx_ND = vary(psum(dx_ND, ("pipe",)))
    return total, (dx_ND, dkernel[: kernel_VD.shape[0]], dweights_N)


def _rows(options, kernel_VD):  # type: ignore[no-untyped-def]
    """How many of the first rows of this table are words: the rest is padding."""
    if not options.shared:
        return kernel_VD.shape[0]
    size = kernel_VD.shape[0]
    return size if axis_size("pipe") * size == options.vocab else options.vocab - axis_index("pipe") * size


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


def _logits(x_CD, table_VD, rows):  # type: ignore[no-untyped-def]
    logits_CV = constrain(_dot("cd,vd->cv", x_CD, table_VD), P(None, "tensor"))
    if isinstance(rows, int) and rows == table_VD.shape[0]:
        return logits_CV
    return jnp.where(_ids(logits_CV) < rows, logits_CV, _MASKED)


def _statistics(options, logits_CV, targets_C, rows):  # type: ignore[no-untyped-def]
    """-> log sum exp [C], the mean logit under the target distribution [C], softmax [C, V]; summed over the stages."""
    top_C1 = jnp.max(logits_CV, axis=1, keepdims=True)
    if options.shared:
        top_C1 = lax.pmax(top_C1, live(("pipe",)))
    exp_CV = jnp.exp(logits_CV - top_C1)
    sum_C1 = jnp.sum(exp_CV, axis=1, keepdims=True)
    expected_C = _expected(options, logits_CV, targets_C, rows)
    if options.shared:
        sum_C1, expected_C = psum(jnp.stack([sum_C1[:, 0], expected_C]), ("pipe",))
        sum_C1 = sum_C1[:, None]
    return (top_C1 + jnp.log(sum_C1))[:, 0], expected_C, exp_CV / sum_C1


def _expected(options, logits_CV, targets_C, rows):  # type: ignore[no-untyped-def]
    at_target_C = jnp.sum(jnp.where(_ids(logits_CV) == targets_C[:, None], logits_CV, 0.0), axis=1)
    if options.smoothing == 0.0:
        return at_target_C
    mean_C = jnp.sum(jnp.where(_ids(logits_CV) < rows, logits_CV, 0.0), axis=1) / options.vocab
    return (1 - options.smoothing) * at_target_C + options.smoothing * mean_C


def _share(options, logits_CV, targets_C, rows):  # type: ignore[no-untyped-def]
    """The target distribution [C, V]: nothing of it falls on what pads the vocabulary."""
    one_hot_CV = _ids(logits_CV) == targets_C[:, None]
    if options.smoothing == 0.0:
        return one_hot_CV
    return (1 - options.smoothing) * one_hot_CV + options.smoothing / options.vocab * (_ids(logits_CV) < rows)


def _ids(logits_CV):  # type: ignore[no-untyped-def]
    return lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)


def _dot(spec: str, a, b):  # type: ignore[no-untyped-def]
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
