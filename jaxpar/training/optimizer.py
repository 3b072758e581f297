"""AdamW with a warm-up, a cosine, and a clipped global norm."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from jaxpar.errors import ConfigError
from jaxpar.structure import ParamInfo


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019). Raises `ConfigError` for impossible values.

    Attributes:
      learning_rate: the peak, reached after the warm-up.
      warmup_steps: from 0 to the peak; a run that is shorter than this is all warm-up.
      final_fraction: of the peak, where the cosine ends at the run's last step.
      b1: decay of the first moment.
      b2: decay of the second moment.
      weight_decay: on matrices alone: parameters of two dims and more, layers not counted.
      clip_norm: the largest global norm of a gradient.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "learning_rate": (self.learning_rate > 0, "more than 0"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "final_fraction": (0 <= self.final_fraction <= 1, "from 0 to 1"),
            "b1": (0 <= self.b1 < 1, "from 0 to below 1"),
            "b2": (0 <= self.b2 < 1, "from 0 to below 1"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip_norm": (self.clip_norm > 0, "more than 0"),
        }
        wrong = [
            f"{name} must be {need}, found {getattr(self, name)}" for name, (good, need) in rules.items() if not good
        ]
        if wrong:
            raise ConfigError("optimizer: " + "; ".join(wrong))

    def build(self, params: Mapping[str, ParamInfo], steps: int) -> optax.GradientTransformation:
        """The optimizer of a run of `steps` steps for these parameters (see `Structure.params`)."""
        matrices = {path: len(info.dims) >= 2 for path, info in params.items()}
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(
                lambda step: self.rate(step, steps),
                b1=self.b1,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=matrices,
            ),
        )

    def rate(self, step: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
        """The learning rate of step `step`, counted from 0, in a run of `steps`."""
        warm = (step + 1) / max(self.warmup_steps, 1)
        progress = jnp.clip((step - self.warmup_steps) / max(steps - self.warmup_steps, 1), 0.0, 1.0)
        cosine = (1 + jnp.cos(jnp.pi * progress)) / 2
        after = self.final_fraction + (1 - self.final_fraction) * cosine
        return self.learning_rate * jnp.where(step < self.warmup_steps, warm, after)
