"""One device's loss and gradients, worked out once for each model and batch."""

from functools import lru_cache

import optax

from experiments.parity_table import LENGTH, make_batch
from jaxpar import Plan, Program
from jaxpar.testing import compare, run_loss_and_grads, run_on_enough_devices
from jaxpar.testing.parity import Gradients
from models.llama import LlamaConfig


@lru_cache
def one_device_run(config: LlamaConfig, precision: str = "float32"):
    plan = Plan("data=1", precision=precision)
    return run_on_enough_devices(Program(config.build, optax.sgd(0.1), plan))


@lru_cache
def reference(
    config: LlamaConfig, kind: str, rows: int, length: int = LENGTH, precision: str = "float32"
) -> tuple[float, Gradients]:
    batch = make_batch(kind, rows, config.vocab_size, length)
    return run_loss_and_grads(one_device_run(config, precision), batch)


def assert_equals_one_device(
    config: LlamaConfig, plan: Plan, kinds: list[str], rows: int, length: int = LENGTH
) -> None:
    """Holds one compiled program against one device, for batches with each kind of weights."""
    run = run_on_enough_devices(Program(config.build, optax.sgd(0.1), plan))
    for kind in kinds:
        found = run_loss_and_grads(run, make_batch(kind, rows, config.vocab_size, length))
        differences = compare(*found, *reference(config, kind, rows, length))
        assert not differences, f"{plan}, {kind}, {config}:\n" + "\n".join(map(str, differences))
