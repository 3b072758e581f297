"""How far bfloat16 takes the gradients from float32, as a typical distance over many initial parameters.

One distance is a draw: on one and the same mesh its ratio to one device's scatters by 8 % between initialisations
(positions split by a ring or by Ulysses: 1.01 on average; a sum over `tensor` of rounded parts: 1.04). The root mean
square over SEEDS scatters by 2 %, so that a mesh that rounds more than one device does is told from luck.
"""

from collections.abc import Mapping

import numpy as np

from jaxpar import Run
from jaxpar.testing import parity

SEEDS = 16
# Times the distance of one device.
ALLOWED = 1.1

Gradients = parity.Gradients


def gradients(run: Run, batch: Mapping[str, np.ndarray]) -> list[Gradients]:
    """Of one batch, from each of SEEDS initial parameters."""
    return [parity.loss_and_grads_at(run, run.init(seed), batch)[1] for seed in range(SEEDS)]


def share(here: list[Gradients], alone: list[Gradients], exact: list[Gradients]) -> float:
    """How far `here` is from float32's `exact`, as a share of what is allowed from how far one device is."""
    return distance(here, exact) / (ALLOWED * distance(alone, exact))


def distance(many: list[Gradients], exact: list[Gradients]) -> float:
    """The root mean square of `relative`."""
    return float(np.mean([relative(g, e) ** 2 for g, e in zip(many, exact, strict=True)]) ** 0.5)


def relative(grads: Gradients, expected: Gradients) -> float:
    """The Euclidean distance of all gradients, as a share of their norm."""
    difference = sum(float(np.sum((grads[path] - g) ** 2)) for path, g in expected.items())
    return (difference / sum(float(np.sum(g**2)) for g in expected.values())) ** 0.5
