"""The vision transformer is one model on every mesh, and looks at images the right way round."""

from dataclasses import replace

import numpy as np
import optax
import pytest

from jaxpar import ConfigError, ModelError, Plan, Program
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from jaxpar.testing.parity import loss_and_grads_at
from jaxpar.training.sample import one_device_context
from models.vit import IMAGES, ViTConfig, patches

CONFIG = ViTConfig(
    image_size=12, patch_size=4, num_classes=5, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, dropout=0.1
)


def run_of(plan):
    return run_on_enough_devices(Program(CONFIG.build, optax.sgd(0.1), plan, batch_axes=IMAGES))


def images(rows=16):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(rows, 12, 12, 3)).astype(np.float32),
        "label": rng.integers(0, 5, rows).astype(np.int32),
    }


@pytest.fixture(scope="module")
def alone():
    run = run_of(Plan("data=1"))
    return run, run_loss_and_grads(run, images())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("data=8", {"zero": 3, "microbatches": 2}), ("data=2,tensor=4", {"sequence_sharded_norms": True})],
)
def test_it_equals_one_device_on_every_mesh(alone, mesh, options):
    """Otherwise images, rows without positions, or attention both ways would need a strategy of their own."""
    run = run_of(Plan(mesh, **options))
    assert compare(*run_loss_and_grads(run, images()), *alone[1]) == []


def test_accuracy_is_reported_and_trains_nothing(alone):
    """Otherwise one could not see what a classifier is worth, or the count of hits would join the loss."""
    run, batch = alone[0], images()
    totals = run.evaluate(state := run.init(0), [batch])
    scores = run.model(state).logits(batch["image"], one_device_context(16, CONFIG.num_patches))
    assert totals["accuracy"] == np.mean(np.argmax(scores, axis=1) == batch["label"])
    assert totals["loss"] == totals["cross_entropy"]


def test_patches_are_squares_of_the_image_row_by_row():
    """Otherwise a patch would hold pixels that are not neighbours."""
    image = np.arange(12 * 12 * 3, dtype=np.float32).reshape(1, 12, 12, 3)
    cut = np.asarray(patches(image, CONFIG))
    assert cut.shape == (1, 9, 48)
    assert np.array_equal(cut[0, 5].reshape(4, 4, 3), image[0, 4:8, 8:12])


def test_what_does_not_fit_is_named(alone):
    """Otherwise a wrong image fails deep inside, and a label that is no class trains nothing in silence."""
    run = alone[0]
    with pytest.raises(ModelError, match=r"images have shape \(8, 8, 3\), the model was made for \(12, 12, 3\)"):
        loss_and_grads_at(run, run.init(0), images() | {"image": np.zeros((16, 8, 8, 3), np.float32)})
    for label in (-1, 5):
        wrong = images() | {"label": np.full(16, label, np.int32)}
        assert np.isnan(loss_and_grads_at(run, run.init(0), wrong)[0])
    for values in ({"patch_size": 5}, {"num_heads": 3}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            replace(CONFIG, **values)
