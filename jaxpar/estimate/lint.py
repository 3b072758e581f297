"""What a compiled step does that its plan does not promise: gathers, and large parameters that are not split.

A plan promises tensor parallelism, and XLA undoes it in silence where a model's annotations do not say enough. Each
finding names the parameter or the source line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from jaxpar.estimate.hlo import Collective
from jaxpar.estimate.promises import Promises
from jaxpar.estimate.replicated import replicated
from jaxpar.estimate.sizes import size
from jaxpar.estimate.source_lines import best_line
from jaxpar.estimate.uses import Uses
from jaxpar.run import Run

_VERBS = {"all-gather": "gathered", "collective-permute": "sent on", "collective-broadcast": "sent to all"}
_MEND = {
    "parameter": "constrain it, and what is made of it, as its names split it",
    "activation": "say with ctx.constrain(x, ...) how what is made there lies over tensor",
}


@dataclass(frozen=True)
class Finding:
    """One thing that the plan does not promise.

    Attributes:
      fault: `gathered parameter`, `gathered activation` or `replicated parameter`.
      parameter: its path; '' of an activation.
      source: the line, `file:number`, that it comes from, or that uses the parameter; '' if the program does not say.
      bytes: on one device and step: what is moved, or held without need.
      text: all of it in a sentence, with a mend.
    """

    fault: str
    parameter: str
    source: str
    bytes: int
    text: str

    def __str__(self) -> str:
        return self.text


def lint(run: Run, collectives: tuple[Collective, ...], uses: Uses) -> tuple[Finding, ...]:
    """All findings, gathers first, the largest first. () for a program that does what its plan promises."""
    broken = Promises(run).broken(collectives)
    found = [*_gathered(sorted(broken, key=lambda c: _key(c, uses)), uses), *_replicated(run, uses)]
    return tuple(sorted(found, key=lambda f: (f.fault == "replicated parameter", -f.bytes, f.parameter, f.source)))


def _key(c: Collective, uses: Uses) -> tuple[str, ...]:
    line = next(filter(None, map(uses.line, c.parameters)), "") or best_line(c.frames)
    return ",".join(filter(None, c.parameters)), line, c.kind, c.axis


def _gathered(broken: list[Collective], uses: Uses) -> Iterator[Finding]:
    """One finding for all collectives of one kind and line."""
    for (parameter, line, kind, axis), same in groupby(broken, key=lambda c: _key(c, uses)):
        group = list(same)
        moved, times = sum(c.executions * c.bytes for c in group), sum(c.executions for c in group)
        what = "parameter" if parameter else "activation"
        shape = " ".join(dict.fromkeys(f"{leaf.dtype}{list(leaf.dims)}" for c in group for leaf in c.leaves))
        loop = " inside a loop" if any(c.loop_depth for c in group) else ""
        who = f"parameter {parameter}" if parameter else f"activation or gradient {shape}"
        text = (
            f"{line or 'no source line'}: {who} is {_VERBS.get(kind, 'traded')} over {axis} by "
            f"{times} x {kind}{loop}, {size(moved)} a step, which the plan does not promise; {_MEND[what]}"
        )
        yield Finding(f"gathered {what}", parameter, line, moved, text)


def _replicated(run: Run, uses: Uses) -> Iterator[Finding]:
    tensor = run.mesh.shape["tensor"]
    for placement, held in replicated(run, uses):
        path, line = placement.info.path, uses.line(placement.info.path)
        wasted = held - held // tensor
        text = (
            f"{line or 'no source line'}: parameter {path} {list(placement.info.dims)} is whole on every device of "
            f"tensor={tensor}, {size(wasted)} of each without need: none of its names {placement.info.names} is split "
            f"over tensor; name its dims, e.g. jaxpar.named(init, 'vocab', 'embed')"
        )
        yield Finding("replicated parameter", path, line, wasted, text)
