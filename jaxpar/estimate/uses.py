"""Where a compiled program computes with a parameter: the source line, and whether it is a table that is looked up."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxpar.estimate.dots import call_target
from jaxpar.estimate.hlo_text import Instruction, Module
from jaxpar.estimate.origin import Origins
from jaxpar.estimate.source_lines import SourceLines, best_line, model_lines

_GEMMS = ("__cublas", "__onednn")


@dataclass(frozen=True)
class Use:
    """`line`: of the model, or of the part of jaxpar that does it."""

    line: str
    lookup: bool


class Uses:
    """Of one module's parameters, by path; found once, when first asked for."""

    def __init__(self, module: Module):
        self.module, self.origins, self.lines = module, Origins(module), SourceLines(module.tables)

    def __getitem__(self, path: str) -> tuple[Use, ...]:
        return self._by_path.get(path, ())

    def line(self, path: str) -> str:
        """Of the first use; '' where none is seen."""
        return next((use.line for use in self[path] if use.line), "")

    @cached_property
    def _by_path(self) -> dict[str, tuple[Use, ...]]:
        found: dict[str, dict[Use, None]] = {}
        for path, use in sorted(self._found(), key=lambda pair: not pair[1].lookup):
            found.setdefault(path, {})[use] = None
        return {path: tuple(uses) for path, uses in found.items()}

    def _found(self) -> Iterator[tuple[str, Use]]:
        for computation in self.module.computations.values():
            for at in computation.instructions.values():
                for operand in _weights(at):
                    if operand not in computation.instructions:
                        continue
                    frames = self.lines.frames(at.attributes)
                    lookup = at.opcode == "gather" and bool(model_lines(frames))
                    for path in self.origins.parameters(computation.name, operand):
                        yield path, Use(best_line(frames), lookup)


def _weights(at: Instruction) -> tuple[str, ...]:
    """The operands of an instruction that may be a weight it computes with."""
    if at.opcode in ("dot", "convolution", "scaled-dot") or call_target(at).startswith(_GEMMS):
        return at.operands[:2]
    return at.operands[:1] if at.opcode == "gather" else ()
