"""Parity: any legal plan gives the loss and the gradients of one device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxpar.plan import Plan
from jaxpar.program import Program
from jaxpar.run import Run
from jaxpar.state import TrainState

Gradients = dict[str, np.ndarray]

# Of the leaf's largest magnitude, and absolute.
RELATIVE, ABSOLUTE = 1e-5, 1e-7


def loss_and_grads(program: Program, batch: Mapping[str, np.ndarray], seed: int = 0) -> tuple[float, Gradients]:
    """The loss and the float32 gradient of every logical parameter (unpadded, layers in depth order) at `init(seed)`.

    Uses as many of `jax.devices()` as the plan's mesh needs. Keys and shapes are the same under every plan.
    """
    return run_loss_and_grads(run_on_enough_devices(program), batch, seed)


def run_loss_and_grads(run: Run, batch: Mapping[str, np.ndarray], seed: int = 0) -> tuple[float, Gradients]:
    """`loss_and_grads` of a run that may be used again: it compiles once for all batches of one shape."""
    return loss_and_grads_at(run, run.init(seed), batch)


def loss_and_grads_at(run: Run, state: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[float, Gradients]:
    """`loss_and_grads` at any state of the run."""
    grads, metrics = run.gradients(state, run.put(batch))
    logical = jax.device_get(run.logical_params(grads))
    return float(metrics["loss"]), {path: np.asarray(g, np.float32) for path, g in logical.items()}


def run_on_enough_devices(program: Program) -> Run:
    """The program on the first devices of this process that its mesh needs."""
    size = program.plan.shape.fixed_size()
    return program.on(jax.devices()[:size])


@dataclass(frozen=True)
class Difference:
    """How far one leaf is from the right one, and how far it may be."""

    path: str
    error: float
    bound: float

    @property
    def share(self) -> float:
        """The error as a share of what is allowed: above 1, or NaN, the leaf is wrong."""
        return self.error / self.bound

    def __str__(self) -> str:
        return f"{self.path}: differs by {self.error:.3g}, allowed {self.bound:.3g}"


def one_device(program: Program) -> Program:
    """The same program on one device, in one microbatch."""
    plan = Plan(mesh="data=1", precision=program.plan.precision, param_dtype=program.plan.param_dtype)
    return replace(program, plan=plan)


def compare(
    loss: float, grads: Gradients, expected_loss: float, expected: Gradients, relative: float = RELATIVE
) -> list[Difference]:
    """What differs by more than `relative` of the leaf's largest magnitude plus 1e-7; NaN always does."""
    return [d for d in distances(loss, grads, expected_loss, expected, relative) if not d.error <= d.bound]


def distances(
    loss: float, grads: Gradients, expected_loss: float, expected: Gradients, relative: float = RELATIVE
) -> list[Difference]:
    """`compare` for every leaf, right or wrong. Raises `AssertionError` when the leaves or their shapes are others."""
    assert grads.keys() == expected.keys(), grads.keys() ^ expected.keys()
    pairs = {"loss": (np.float32(loss), np.float32(expected_loss))} | {p: (grads[p], g) for p, g in expected.items()}
    found = []
    for path, (value, want) in pairs.items():
        assert value.shape == want.shape, (path, value.shape, want.shape)
        bound = relative * float(np.abs(want).max(initial=0.0)) + ABSOLUTE
        found.append(Difference(path, float(np.abs(value - want).max(initial=0.0)), bound))
    return found


def assert_parity(program: Program, batch: Mapping[str, np.ndarray], seed: int = 0, relative: float = RELATIVE) -> None:
    """Raises `AssertionError` naming every leaf whose gradient differs from one device's."""
    differences = compare(
        *loss_and_grads(program, batch, seed), *loss_and_grads(one_device(program), batch, seed), relative
    )
    if differences:
        lines = "\n".join(f"  {d}" for d in differences)
        raise AssertionError(f"{program.plan} does not equal one device:\n{lines}")
