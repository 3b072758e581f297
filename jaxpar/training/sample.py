"""Text out of a model: one token after another, on one device."""

import itertools
from collections.abc import Callable
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
from jaxpar.plan import Plan
from jaxpar.training.callbacks import Callback, Loop

FILE = "sample.txt"


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
        rules=Plan().rules,
        sites=itertools.count(),
    )


def _attend(q: Array, k: Array, v: Array, *, segments: Array | None, causal: bool) -> Array:
    return blockwise_attention(q, k, v, segments_q=segments, segments_k=segments, causal=causal)


def generate(
    model: nnx.Module, prompt: np.ndarray, count: int, *, window: int, temperature: float = 1.0, seed: int = 0
) -> np.ndarray:
    """int32[count]: the tokens that `model.logits(tokens, ctx)` gives after int[length] `prompt`, which is not empty.

    The model sees the last `window` tokens. `temperature` 0 takes the likeliest token each time. The model's arrays
    are on one device. Compiles once for each length of a prompt and `count`.
    """
    if not callable(getattr(model, "logits", None)):
        raise ModelError(f"{type(model).__name__} has no logits(tokens, ctx), which sampling needs")
    tokens = np.zeros(max(window, len(prompt) + count), np.int32)
    tokens[: len(prompt)] = prompt
    graphdef, state = nnx.split(model)
    out = _generate(graphdef, state, tokens, len(prompt), count, window, temperature, jax.random.key(seed))
    return np.asarray(out)[len(prompt) : len(prompt) + count]


@partial(jax.jit, static_argnums=(0, 4, 5))
def _generate(
    graphdef: Any,
    state: Any,
    tokens: Int[Array, " n"],
    first: Any,
    count: int,
    window: int,
    temperature: Any,
    key: Array,
) -> Int[Array, " n"]:
    model = nnx.merge(graphdef, state)

    def append(i: Array, tokens: Array) -> Array:
        at = first + i
        start = jnp.maximum(at - window, 0)
        seen = lax.dynamic_slice_in_dim(tokens, start, window)
        logits = model.logits(seen[None], one_device_context(1, window))[0, at - start - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits))
        return tokens.at[at].set(token.astype(tokens.dtype))

    return lax.fori_loop(0, count, append, tokens)


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
        model = loop.run.model(loop.state)
        graphdef, state = nnx.split(model)
        local = nnx.merge(graphdef, jax.device_put(jax.device_get(state), loop.run.mesh.devices.flat[0]))
        tokens = generate(
            local, self._encode(self._prompt), self._count, window=self._window, temperature=self._temperature
        )
        text = self._prompt + self._decode(tokens)
        (self._directory / FILE).write_text(text + "\n", encoding="utf-8")
        print(f"\nthe model continues {self._prompt!r}:\n{text}\n", flush=True)
