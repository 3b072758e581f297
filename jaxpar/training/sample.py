"""Text out of a model: one token after another, on one device."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Int

from jaxpar.errors import ModelError
from jaxpar.model import Context
from jaxpar.parallel.attention import blockwise_attention
from jaxpar.parallel.expert import Route
from jaxpar.parallel.halo import Halo
from jaxpar.plan import Plan
from jaxpar.training.average import to_averaged
from jaxpar.training.callbacks import Callback, Loop
from jaxpar.training.kv_cache import Recall, Remember

FILE = "sample.txt"

# Rounding in bfloat16 stays well below it.
LARGEST_GAP = 0.05


def one_device_context(rows: int, positions: int) -> Context:
    """What a model needs to run outside a program, on one device: rows of one document each, no dropout."""
    index = jnp.arange(positions, dtype=jnp.int32)
    return Context(
        rows=jnp.arange(rows, dtype=jnp.int32),
        index=index,
        positions=jnp.broadcast_to(index, (rows, positions)),
        segments=None,
        key=jax.random.key(0),
        depth=jnp.zeros((), jnp.int32),
        train=False,
        attention=_attend,
        neighbours=Halo(),
        routing=Route(),
        rules=Plan().rules,
        sites=itertools.count(),
    )


def _attend(q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool, window: int | None = None) -> Array:
    return blockwise_attention(q, k, v, segments_q=segments, segments_k=segments, causal=causal, window=window)


def generate(
    model: nnx.Module, prompt: np.ndarray, count: int, *, window: int, temperature: float = 1.0, seed: int = 0
) -> np.ndarray:
    """int32[count]: the tokens that `model.logits(tokens, ctx)` gives after int[length] `prompt`, which is not empty.

    The model sees at most `window` positions, such as it was trained on; when they are full it goes on from the later
    half of them. `temperature` 0 takes the likeliest token each time. Compiles once for each `window`. Raises
    `ModelError` for a model without `logits`, and for one whose positions meet elsewhere than in `ctx.attend`.
    """
    if not callable(getattr(model, "logits", None)):
        raise ModelError(f"{type(model).__name__} has no logits(tokens, ctx), which sampling needs")
    graphdef, state = nnx.split(model)
    tokens, end, key = [int(t) for t in prompt], len(prompt) + count, jax.random.key(seed)
    while len(tokens) < end:
        known = tokens if len(tokens) <= window else tokens[-max(1, window // 2) :]
        total = min(window + 1, len(known) + end - len(tokens))
        row = np.zeros(window + 1, np.int32)
        row[: len(known)] = known
        row, gap = _fill(graphdef, state, row, len(known), total, temperature, jax.random.fold_in(key, len(tokens)))
        _check_gap(model, float(gap))
        tokens += np.asarray(row)[len(known) : total].tolist()
    return np.array(tokens[len(prompt) :], np.int32)


@partial(jax.jit, static_argnums=0)
def _fill(
    graphdef: Any, state: Any, row: Int[Array, " w"], known: Any, total: Any, temperature: Any, key: Array
) -> tuple[Int[Array, " w"], Array]:
    """-> the row with its tokens up to `total`, and how far the cache was off where it can be told."""
    model = nnx.merge(graphdef, state)
    window = row.shape[0] - 1
    whole = Remember()
    expected = model.logits(row[None, :window], replace(one_device_context(1, window), attention=whole))[0, known - 1]

    # The first turn computes the last known position once more, so that the two ways can be compared.
    def append(at: Array, carry: Any) -> Any:
        row, cache, gap = carry
        recall = Recall(cache, at)
        ctx = replace(one_device_context(1, 1), index=at[None], positions=at[None, None], attention=recall)
        logits = model.logits(row[at][None, None], ctx)[0, 0]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits))
        off = jnp.max(jnp.abs(logits - expected)) / (1 + jnp.max(jnp.abs(expected)))
        return row.at[at + 1].set(token.astype(row.dtype)), recall.cache, jnp.where(at == known - 1, off, gap)

    carry = row, whole.cache, jnp.zeros((), expected.dtype)
    row, _, gap = lax.fori_loop(known - 1, total - 1, append, carry)
    return row, gap


def _check_gap(model: nnx.Module, gap: float) -> None:
    if gap > LARGEST_GAP:
        raise ModelError(
            f"{type(model).__name__} scores a token otherwise when it comes alone than in its row: by {gap:.1%} of the "
            f"largest score. Token by token only layers work whose positions meet in ctx.attend alone"
        )


class Sample(Callback):
    """Prints text that the trained model continues, and keeps it in `sample.txt`. For models of one process."""

    def __init__(
        self,
        directory: Path,
        encode: Callable[[str], np.ndarray],
        decode: Callable[[np.ndarray], str],
        prompt: str,
        *,
        count: int = 256,
        window: int,
        temperature: float = 0.8,
    ):
        self._directory, self._encode, self._decode = directory, encode, decode
        self._prompt, self._count, self._window, self._temperature = prompt, count, window, temperature

    def on_end(self, loop: Loop) -> None:
        if not loop.finished or jax.process_count() > 1:
            return
        model = loop.run.model(to_averaged(loop.run)(loop.state))
        graphdef, state = nnx.split(model)
        local = nnx.merge(graphdef, jax.device_put(jax.device_get(state), loop.run.mesh.devices.flat[0]))
        tokens = generate(
            local, self._encode(self._prompt), self._count, window=self._window, temperature=self._temperature
        )
        text = self._prompt + self._decode(tokens)
        (self._directory / FILE).write_text(text + "\n", encoding="utf-8")
        print(f"\nthe model continues {self._prompt!r}:\n{text}\n", flush=True)
