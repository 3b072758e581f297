"""The learning rate over a run, as a share of its peak. Counted in updates: a skipped step does not move it."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

Schedule = Literal["cosine", "linear", "wsd", "constant"]


def share(
    schedule: Schedule, update: Int[Array, ""] | int, updates: int, warmup: int, final: float, decay: float
) -> Float[Array, ""]:
    """The share of the peak at update `update`, counted from 0, of a run of `updates`.

    Rises over `warmup` updates, then: `cosine` and `linear` fall to `final` at the end; `wsd` (warm-up, stable, decay;
    Hu et al., MiniCPM, 2024) stays, and falls in a line over the last share `decay` of the run; `constant` stays.
    """
    warm = (update + 1) / max(warmup, 1)
    return jnp.where(update < warmup, warm, _after(schedule, update, updates, warmup, final, decay))


def _after(
    schedule: Schedule, update: Int[Array, ""] | int, updates: int, warmup: int, final: float, decay: float
) -> Array:
    if schedule == "constant":
        return jnp.ones(())
    start = max(warmup, updates - round(decay * updates)) if schedule == "wsd" else warmup
    progress = jnp.clip((update - start) / max(updates - start, 1), 0.0, 1.0)
    left = (1 + jnp.cos(jnp.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return final + (1 - final) * left
