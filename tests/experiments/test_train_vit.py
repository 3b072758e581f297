"""The vision experiment learns."""

import numpy as np

from experiments.train_vit import MODEL, Config, main, stripes
from jaxpar import Plan


def test_it_recognises_new_images_after_a_hundred_steps():
    """Otherwise a model that trains by the public API alone would run, and learn nothing."""
    assert main(Config(plan=Plan("data=4,tensor=2", zero=3), steps=100)) > 0.5


def test_images_follow_from_their_seed():
    """Otherwise two processes, or two runs, would train on other images."""
    first, again, other = (stripes(4, seed) for seed in (3, 3, 4))
    assert np.array_equal(first["image"], again["image"]) and not np.array_equal(first["image"], other["image"])
    assert first["image"].shape == (4, *MODEL.image_shape) and first["label"].max() < MODEL.num_classes
