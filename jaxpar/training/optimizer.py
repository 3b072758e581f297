"""The optimizer of a run as a value: which rule, its schedule, what decays, groups, and an average to evaluate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import optax
from jax import Array
from jaxtyping import Float, Int

from jaxpar.errors import ConfigError
from jaxpar.structure import ParamInfo
from jaxpar.training.average import parameter_average
from jaxpar.training.groups import Groups, Settings, settings
from jaxpar.training.low_precision import float32_master, stochastic_rounding
from jaxpar.training.muon import muon
from jaxpar.training.per_layer import per_layer
from jaxpar.training.per_parameter import decayed, scaled
from jaxpar.training.schedule import Schedule, share

LowPrecision = Literal["master", "stochastic"]
Name = Literal["adamw", "lion", "adafactor", "sgd", "muon", "schedule_free"]


@dataclass(frozen=True)
class OptimizerConfig:
    """Raises `ConfigError` for impossible values.

    Attributes:
      name: `adamw` (Loshchilov and Hutter, 2019), `lion` (Chen et al., 2023), `adafactor` (Shazeer and Stern, 2018;
        each layer by itself), `sgd` with momentum, `muon` (Jordan et al., 2024; adamw for what is no matrix), or
        `schedule_free` AdamW (Defazio et al., 2024), which is evaluated on its own average.
      learning_rate: the peak, reached after the warm-up. For adafactor it is relative to a parameter's own size.
      warmup_steps: from 0 to the peak; a run that is shorter than this is all warm-up.
      schedule: after the warm-up: `cosine`, `linear`, `wsd` or `constant`, see `jaxpar.training.schedule`.
      final_fraction: of the peak, where the schedule ends at the run's last update.
      decay_fraction: of the run's updates, in which `wsd` falls.
      b1: decay of the first moment; the momentum of sgd; the interpolation of schedule_free.
      b2: decay of the second moment.
      weight_decay: times the learning rate, on matrices and tables by their logical names, see
        `jaxpar.training.matrices`; `groups` override it.
      clip_norm: the largest global norm of a gradient.
      min_dim_to_factor: adafactor keeps a whole second moment for parameters whose second largest dim is smaller.
      groups: other settings for parameters by their paths; the first that matches counts. On a command line
        `'*.bias:weight_decay=0' 'embedding:learning_rate=0.5' 'blocks.attention.*:frozen'`.
      low_precision: how parameters of fewer than 32 bits are updated (`Plan.param_dtype`): `master` keeps float32
        copies, `stochastic` rounds bfloat16 at random; see `jaxpar.training.low_precision`.
      average: decay of an exponential moving average of the parameters, with which a run is evaluated; 0: none.
    """

    name: Name = "adamw"
    learning_rate: float = 3e-4
    warmup_steps: int = 100
    schedule: Schedule = "cosine"
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    min_dim_to_factor: int = 128
    groups: Groups = ()
    low_precision: LowPrecision = "master"
    average: float = 0.0

    def __post_init__(self) -> None:
        rules = {
            "name": (self.name in get_args(Name), f"one of {', '.join(get_args(Name))}"),
            "learning_rate": (self.learning_rate > 0, "more than 0"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "schedule": (self.schedule in get_args(Schedule), f"one of {', '.join(get_args(Schedule))}"),
            "final_fraction": (0 <= self.final_fraction <= 1, "from 0 to 1"),
            "decay_fraction": (0 <= self.decay_fraction <= 1, "from 0 to 1"),
            "b1": (0 <= self.b1 < 1, "from 0 to below 1"),
            "b2": (0 <= self.b2 < 1, "from 0 to below 1"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip_norm": (self.clip_norm > 0, "more than 0"),
            "min_dim_to_factor": (self.min_dim_to_factor >= 1, "1 or more"),
            "low_precision": (
                self.low_precision in get_args(LowPrecision),
                f"one of {', '.join(get_args(LowPrecision))}",
            ),
            "average": (0 <= self.average < 1, "from 0 to below 1"),
        }
        if self.name == "schedule_free":
            rules["schedule"] = (self.schedule == "constant", "constant with schedule_free")
            rules["b1"] = (0 < self.b1 < 1, "above 0 and below 1 with schedule_free")
            rules["average"] = (self.average == 0, "0 with schedule_free, which keeps an average of its own")
        wrong = [
            f"{name} must be {need}, found {getattr(self, name)}" for name, (good, need) in rules.items() if not good
        ]
        if wrong:
            raise ConfigError("optimizer: " + "; ".join(wrong))

    def build(self, params: Mapping[str, ParamInfo], steps: int) -> optax.GradientTransformation:
        """The optimizer of a run of `steps` steps for these parameters (see `Structure.params`).

        Raises `ConfigError` for a group that matches none of them.
        """
        of = settings(params, self.groups, self.weight_decay)
        trained = self._trained(params, of, steps)
        if not any(s.frozen for s in of.values()):
            return trained
        labels = {path: "frozen" if s.frozen else "trained" for path, s in of.items()}
        return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)

    def rate(self, update: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
        """The learning rate of update `update`, counted from 0, in a run of `steps`."""
        return self.learning_rate * share(
            self.schedule, update, steps, self.warmup_steps, self.final_fraction, self.decay_fraction
        )

    def _trained(
        self, params: Mapping[str, ParamInfo], of: Mapping[str, Settings], steps: int
    ) -> optax.GradientTransformation:
        step = optax.chain(
            self._direction(params),
            decayed({path: s.weight_decay for path, s in of.items()}),
            scaled({path: s.learning_rate for path, s in of.items()}),
            optax.scale_by_learning_rate(lambda update: self.rate(update, steps)),
        )
        if self.name == "schedule_free":
            # It counts from 1 where all others count from 0.
            step = optax.contrib.schedule_free(step, lambda count: self.rate(count - 1, steps), b1=self.b1)
        average = [parameter_average(self.average)] if self.average else []
        exact = optax.chain(optax.clip_by_global_norm(self.clip_norm), step, *average)
        return float32_master(exact) if self.low_precision == "master" else stochastic_rounding(exact)

    def _direction(self, params: Mapping[str, ParamInfo]) -> optax.GradientTransformation:
        """The update before decay and learning rate."""
        match self.name:
            case "adamw":
                return optax.scale_by_adam(self.b1, self.b2)
            case "schedule_free":
                return optax.scale_by_adam(0.0, self.b2)
            case "lion":
                return optax.scale_by_lion(self.b1, self.b2)
            case "sgd":
                return optax.trace(self.b1) if self.b1 else optax.identity()
            case "muon":
                return muon(params, self.b1, self.b2)
            case "adafactor":
                return per_layer(_adafactor(self.min_dim_to_factor), params)


def _adafactor(min_dim_to_factor: int) -> optax.GradientTransformation:
    """As `optax.adafactor`, before learning rate and decay."""
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim_to_factor),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
