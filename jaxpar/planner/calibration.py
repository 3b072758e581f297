"""What measured steps taught about a machine: a small file, which the next search on its kind reads."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from jaxpar.errors import ConfigError
from jaxpar.estimate.time import StepTime

# Parts of a step by what they are limited by; what stands in neither, `host`, is fixed.
COMPUTE = ("forward", "backward", "recompute", "head", "bubble", "optimizer", "spread")
COMMUNICATION = ("tensor", "seq", "expert", "pipe", "data", "contention")
# How far, in log space, a factor is believed to lie from 1 before anything is measured; and a measured step's noise.
_WIDTH, _NOISE = 1.0, 0.05


@dataclass(frozen=True)
class Sample:
    """One measured step beside its uncorrected prediction, in seconds."""

    plan: str
    compute: float
    communication: float
    fixed: float
    measured: float

    @classmethod
    def of(cls, plan: str, step: StepTime, measured: float) -> "Sample":
        parts = step.parts
        compute, communication = (sum(parts[name] for name in names) for names in (COMPUTE, COMMUNICATION))
        return cls(plan, compute, communication, parts["host"], measured)


@dataclass(frozen=True)
class Calibration:
    """Factors on the predicted seconds of compute, communication and what a step does once, and what they come from."""

    kind: str
    compute: float = 1.0
    communication: float = 1.0
    fixed: float = 1.0
    samples: tuple[Sample, ...] = ()

    @classmethod
    def fit(cls, kind: str, samples: Sequence[Sample]) -> "Calibration":
        """The factors under which predictions come nearest to the samples. Few samples move them little where they
        cannot tell them apart: each factor starts at 1."""
        table = np.array([[s.compute, s.communication, s.fixed] for s in samples])
        measured = np.log([s.measured for s in samples])

        def residuals(logs: np.ndarray) -> np.ndarray:
            return np.concatenate([(np.log(table @ np.exp(logs)) - measured) / _NOISE, logs / _WIDTH])

        compute, communication, fixed = map(float, np.exp(least_squares(residuals, np.zeros(3)).x))
        return cls(kind, compute, communication, fixed, tuple(samples))

    def applied(self, step: StepTime) -> StepTime:
        """A predicted step as this machine would take it."""
        factors = {name: self.compute for name in COMPUTE} | {name: self.communication for name in COMMUNICATION}
        factors["host"] = self.fixed
        changed: dict[str, Any] = {name: factors[name] * value for name, value in step.parts.items()}
        return replace(step, **changed)

    def with_samples(self, samples: Sequence[Sample]) -> "Calibration":
        """Fitted again with more samples; of a plan measured before, the new one counts."""
        known = {sample.plan: sample for sample in (*self.samples, *samples)}
        return Calibration.fit(self.kind, tuple(known.values()))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Raises `ConfigError` for a file that `save` did not write."""
        try:
            values = json.loads(path.read_text())
            samples = tuple(Sample(**sample) for sample in values.pop("samples"))
            return cls(**values, samples=samples)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(
                f"calibration {path}: {error}; needs {known}: measure again, or remove the file"
            ) from error

    @property
    def doubt(self) -> float:
        """How far, in log space, corrected predictions still lie from the samples: their root mean square."""
        errors = [np.log(self._corrected(s) / s.measured) for s in self.samples]
        return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0

    def _corrected(self, s: Sample) -> float:
        return self.compute * s.compute + self.communication * s.communication + self.fixed * s.fixed

    @property
    def table(self) -> str:
        """A line for each sample: predicted, corrected, measured."""
        lines = []
        for s in self.samples:
            before = s.compute + s.communication + s.fixed
            after = self._corrected(s)
            lines.append(f"  {s.measured:.4g} s measured, {before:.4g} predicted, {after:.4g} corrected: {s.plan}")
        return "\n".join([self.factors, *lines])

    @property
    def factors(self) -> str:
        found = {name: getattr(self, name) for name in ("compute", "communication", "fixed")}
        return f"{self.kind}: " + ", ".join(f"{name} x{factor:.3g}" for name, factor in found.items())


def default_path(kind: str) -> Path:
    """Of this machine's calibration for devices of that kind."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxpar" / f"calibration-{kind.replace(' ', '_')}.json"
