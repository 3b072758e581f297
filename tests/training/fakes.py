"""A loop as callbacks see it, without a model."""

import jax.numpy as jnp

from jaxpar.state import TrainState
from jaxpar.training.callbacks import Loop


def make_loop(step=0, steps=10, skipped=0):
    state = TrainState(jnp.int32(step), jnp.int32(skipped), None, {}, ())
    return Loop(run=None, data=None, steps=steps, callbacks=(), state=state, step=step)


def record(loss=2.0, skipped=0.0, **more):
    speed = {"tokens_per_second": 98_760.0, "tokens_per_second_per_device": 12_345.0, "tflops_per_device": 0.00123}
    return {"loss": loss, "skipped": skipped, "seconds": 0.1, **speed, **more}
