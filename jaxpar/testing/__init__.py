"""Parity against one device, for jaxpar's own models and for yours."""

from jaxpar.testing.parity import (
    assert_parity,
    compare,
    loss_and_grads,
    one_device,
    run_loss_and_grads,
    run_on_enough_devices,
)

__all__ = ["assert_parity", "compare", "loss_and_grads", "one_device", "run_loss_and_grads", "run_on_enough_devices"]
