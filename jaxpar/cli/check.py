"""`jaxpar check my_module:build`: whether a user's own model gives one device's numbers on every mesh."""

import importlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import optax
import tyro

from jaxpar.batch import token_shapes
from jaxpar.errors import ConfigError, PlanError
from jaxpar.mesh import simulate
from jaxpar.plan import Plan
from jaxpar.program import Program
from jaxpar.testing.parity import compare, loss_and_grads, one_device

_LENGTH = 32


@dataclass(frozen=True)
class CheckConfig:
    """Compares loss and gradients of a model on meshes with those on one device.

    Attributes:
      build: `module:function`, where `function(rngs)` builds the model.
      meshes: each a mesh such as `data=8` or `data=4,tensor=2`.
      zero: the ZeRO stages to try on each mesh.
      microbatches: of a step.
      batch: `module:function`, where `function()` gives a batch; by default random tokens.
      simulate: so many simulated CPU devices; 0: the devices of this machine.
    """

    build: tyro.conf.Positional[str]
    meshes: tuple[str, ...] = ("data=8", "data=4,tensor=2")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    microbatches: int = 1
    batch: str | None = None
    simulate: Annotated[int, tyro.conf.arg(metavar="N")] = 8


def check(arguments: Sequence[str]) -> int:
    """Prints a line for each mesh and ZeRO stage; 0 if all of them equal one device, else 1."""
    config = tyro.cli(CheckConfig, args=list(arguments), prog="jaxpar check")
    if config.simulate:
        simulate(config.simulate)
    plans = [
        Plan(mesh=m, zero=z, microbatches=config.microbatches) for m, z in itertools.product(config.meshes, config.zero)
    ]
    program = Program(_load(config.build), optax.sgd(1.0), plans[0])
    batch = _load(config.batch)() if config.batch else _random_tokens(program, plans)
    width = max(len(_name(plan)) for plan in plans)
    good = True
    for plan, passed, finding in compare_plans(program, plans, batch):
        print(f"{_name(plan):<{width}}  {finding}", flush=True)
        good = good and passed
    print("every plan equals one device" if good else "not every plan equals one device")
    return 0 if good else 1


def compare_plans(
    program: Program, plans: Sequence[Plan], batch: Mapping[str, np.ndarray]
) -> Iterator[tuple[Plan, bool, str]]:
    """For each plan: whether it gives the loss and gradients of one device, and what was found."""
    expected = loss_and_grads(one_device(program), batch)
    for plan in plans:
        try:
            found = loss_and_grads(replace(program, plan=plan), batch)
        except PlanError as error:
            yield plan, False, "not legal: " + "; ".join(error.problems)
            continue
        differences = compare(*found, *expected)
        text = "; ".join(map(str, differences[:3])) + (" ..." if len(differences) > 3 else "")
        yield plan, not differences, text or f"equal, loss {found[0]:.6f}"


def _name(plan: Plan) -> str:
    return f"{plan.mesh} zero={plan.zero}"


def _random_tokens(program: Program, plans: Sequence[Plan]) -> dict[str, np.ndarray]:
    vocabulary = program.structure.vocab_size
    if vocabulary is None:
        raise ConfigError(
            "the model names no dim 'vocab', so random tokens may not fit it: give --batch module:function"
        )
    sizes = [plan.shape.sizes for plan in plans]
    rows = 2 * plans[0].microbatches * math.lcm(*(max(1, s["data"]) * max(1, s["expert"]) for s in sizes))
    generator = np.random.default_rng(0)
    batch = {
        name: generator.integers(0, vocabulary, shape.shape).astype(shape.dtype)
        for name, shape in token_shapes(rows, _LENGTH).items()
    }
    # A mask that no split shares evenly.
    batch["weights"] = (generator.random((rows, _LENGTH)) < 0.7).astype(np.float32)
    return batch


def _load(name: str) -> Any:
    """The object `module:attribute`; modules of the working folder are found too."""
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        raise ConfigError(f"needed module:function, found {name!r}; e.g. my_model:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"there is no module {module_name!r} in {os.getcwd()} or among those installed") from error
    if not callable(found := getattr(module, attribute, None)):
        raise ConfigError(f"module {module_name!r} has no function {attribute!r}")
    return found
