"""What was found: names for a model's parameters, why, and the model with them."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from jaxpar.axis_rules import Names
from jaxpar.estimate.sizes import size
from jaxpar.structure import Build


@dataclass(frozen=True)
class Choice:
    """One parameter's. `shape`: without the layers. `why`: of what it is made, and what that costs."""

    path: str
    shape: tuple[int, ...]
    names: Names
    why: str

    @property
    def split(self) -> bool:
        return any(name is not None for name in self.names)


@dataclass(frozen=True)
class Annotated:
    """A layout over `tensor` devices.

    Attributes:
      build: the model, its parameters named: to be given to `jaxpar.Program`.
      choices: of each parameter.
      bytes: what one device sends over `tensor` in a step of that batch, forward and backward, by the choices made.
      tensor: the size of the axis.
    """

    build: Build
    choices: tuple[Choice, ...]
    bytes: int
    tensor: int

    @property
    def names(self) -> Mapping[str, Names]:
        """By path: what `jaxpar.named` is to be given in the model's own code."""
        return {choice.path: choice.names for choice in self.choices}

    def explain(self, width: int = 160) -> str:
        """A table: each parameter, how it is split, and why."""
        table = Table("parameter", "shape", "names", "why", box=None, pad_edge=False)
        for c in self.choices:
            names = ", ".join("-" if name is None else str(name) for name in c.names)
            table.add_row(c.path, "x".join(map(str, c.shape)), names, c.why)
        console = Console(width=width, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(table)
            split, every = sum(c.split for c in self.choices), len(self.choices)
            console.print(
                f"{split} of {every} parameters are split; tensor={self.tensor} sends {size(self.bytes)} a step"
            )
        return captured.get().rstrip()

    def __str__(self) -> str:
        return self.explain()
