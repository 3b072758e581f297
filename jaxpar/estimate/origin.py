"""Which arguments of a program an array is a piece of, by following the operations that only move data."""

import re

from jaxpar.estimate.hlo_text import Computation, Instruction, Module

_MOVES = {
    "bitcast",
    "bitcast-convert",
    "broadcast",
    "concatenate",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "dynamic-slice",
    "get-tuple-element",
    "opt-barrier",
    "optimization-barrier",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
    "tuple",
    "all-gather",
    "all-gather-start",
    "all-gather-done",
    "all-to-all",
    "collective-permute",
    "collective-permute-start",
    "collective-permute-done",
    "async-start",
    "async-done",
}
# Of these only the first operand is moved; the others say where from.
_FIRST_ONLY = {"dynamic-slice", "pad", "copy-done", "all-gather-done", "collective-permute-done", "async-done"}
_PARAMETER = re.compile(r"^state\.params\[\\?'(.*?)\\?'\]$")
_DEEPEST = 200

Place = tuple[str, str, int | None]  # computation, instruction, which element of its tuple (None: it is no tuple)


class Origins:
    """Answers for one module."""

    def __init__(self, module: Module):
        self.module = module
        self.callers = _callers(module)

    def parameters(self, computation: str, name: str) -> tuple[str, ...]:
        """Paths of the model's parameters that this array consists of; () if it is computed from others as well."""
        found = self._sources((computation, name, None), set(), 0)
        if found is None:
            return ()
        paths = [match.group(1) for n in sorted(found) if (match := _PARAMETER.search(n))]
        return tuple(paths) if len(paths) == len(found) else ()

    def _sources(self, place: Place, seen: set[Place], depth: int) -> set[str] | None:
        """Names of the program's arguments; None if anything is computed on the way."""
        if place in seen:
            return set()
        if depth > _DEEPEST:
            return None
        seen.add(place)
        where, name, element = place
        computation = self.module.computations[where]
        at = computation.instructions[name]
        if at.opcode == "constant" or at.opcode == "iota":
            return set()  # padding
        if at.opcode == "parameter":
            return self._parameter(where, at, element, seen, depth)
        return self._union(self._operands(computation, at, element), seen, depth)

    def _union(self, places: list[Place] | None, seen: set[Place], depth: int) -> set[str] | None:
        if places is None:
            return None
        found: set[str] = set()
        for place in places:
            sources = self._sources(place, seen, depth + 1)
            if sources is None:
                return None
            found |= sources
        return found

    def _operands(self, computation: Computation, at: Instruction, element: int | None) -> list[Place] | None:
        where, names = computation.name, [n for n in at.operands if n in computation.instructions]
        if at.opcode == "get-tuple-element":
            return [(where, names[0], int(at.attribute("index")))]
        if at.opcode == "tuple" and element is not None:
            return [(where, names[element], None)]
        if at.opcode in ("fusion", "call", "async-start") and at.callees:
            callee = self.module.computations[at.callees[0]]
            return [(callee.name, callee.root.name, element)]
        if at.opcode == "while":
            body = self.module.computations[at.attribute("body")]
            return [(where, names[0], element), (body.name, body.root.name, element)]
        if at.opcode not in _MOVES:
            return None
        if element is not None and at.base == "all-gather" and len(names) > element:
            return [(where, names[element], None)]
        return [(where, n, None) for n in (names[:1] if at.opcode in _FIRST_ONLY else names)]

    def _parameter(
        self, where: str, at: Instruction, element: int | None, seen: set[Place], depth: int
    ) -> set[str] | None:
        if where == self.module.entry:
            return {at.op_name}
        places: list[Place] = []
        for caller, instruction in self.callers.get(where, ()):
            names = [n for n in instruction.operands if n in self.module.computations[caller].instructions]
            if instruction.opcode == "while":
                places.append((caller, names[0], element))
                body = self.module.computations[where]
                places.append((where, body.root.name, element))
            elif instruction.opcode == "conditional":
                places.append((caller, names[1 + instruction.branches.index(where)], element))
            else:
                places.append((caller, names[int(at.arguments)], element))
        return self._union(places, seen, depth) if places else None


def _callers(module: Module) -> dict[str, list[tuple[str, Instruction]]]:
    """For each computation, the instructions that run it."""
    found: dict[str, list[tuple[str, Instruction]]] = {}
    for computation in module.computations.values():
        for at in computation.instructions.values():
            called = (at.attribute("body"),) if at.opcode == "while" else (*at.callees, *at.branches)
            for name in called:
                found.setdefault(name, []).append((computation.name, at))
    return found
