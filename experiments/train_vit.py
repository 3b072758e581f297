"""Trains a small vision transformer to see which way stripes run, in a minute, on images made here.

    python experiments/train_vit.py --simulate 8 --plan.mesh data=4,tensor=2 --plan.zero 3

The whole program by hand, where `experiments/pretrain_lm.py` has a trainer: a model, an optimizer and a plan, and a
loop of steps. At first one image in eight is recognised, by chance; at the end nearly all new ones are.
"""

import sys
from dataclasses import dataclass, field

import numpy as np
import optax
import tyro

from jaxpar import Plan, Program, simulate
from jaxpar.cli.friendly import friendly_errors
from models.vit import IMAGES, ViTConfig

MODEL = ViTConfig(
    image_size=32, patch_size=8, num_classes=8, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128, dropout=0.1
)
EVALUATION = -1  # no step has this seed


@dataclass(frozen=True)
class Config:
    """What to train.

    Attributes:
      plan: how the model is spread.
      steps: how many.
      rows: images of a step.
      report_every: steps between lines.
      simulate: so many simulated CPU devices in place of those of this machine.
    """

    plan: Plan = field(default_factory=Plan)
    steps: int = 200
    rows: int = 64
    report_every: int = 25
    simulate: int | None = None


def stripes(rows: int, seed: int) -> dict[str, np.ndarray]:
    """float32 images of stripes in one of `num_classes` directions, of any width and phase, under heavy noise."""
    rng = np.random.default_rng(seed % 2**32)
    size, classes = MODEL.image_size, MODEL.num_classes
    label = rng.integers(0, classes, rows)
    angle, wavelength, phase = np.pi * label / classes, rng.uniform(4, 8, rows), rng.uniform(0, 1, rows)
    y, x = np.mgrid[:size, :size]
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    waves = np.sin(2 * np.pi * (along / wavelength[:, None, None] + phase[:, None, None]))
    colour = rng.uniform(0.5, 1, (rows, 1, 1, MODEL.channels))
    image = waves[..., None] * colour + rng.normal(scale=1.5, size=(rows, *MODEL.image_shape))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def main(config: Config) -> float:
    """Trains and returns the accuracy on new images, from 0 to 1."""
    if config.simulate is not None:
        simulate(config.simulate)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, max(config.steps, 21)))
    run = Program(MODEL.build, optimizer, config.plan, batch_axes=IMAGES).on()
    print(f"{run.plan}, {run.mesh.size} devices")
    state = run.init()
    for step in range(1, config.steps + 1):
        state, metrics = run.step(state, run.put(stripes(config.rows, seed=step)))
        if step == 1 or step % config.report_every == 0:
            print(f"step {step:4}  loss {float(metrics['loss']):.4f}  accuracy {float(metrics['accuracy']):.1%}")
    totals = run.evaluate(state, [stripes(256, EVALUATION)])
    print(f"new images: loss {totals['loss']:.4f}, accuracy {totals['accuracy']:.1%}")
    return totals["accuracy"]


if __name__ == "__main__":
    with friendly_errors():
        main(tyro.cli(Config, prog=sys.argv[0]))
