"""How often a compiled while loop runs its body."""

import math
import operator
import re
from dataclasses import dataclass

from jaxpar.estimate.hlo_text import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
    "EQ": operator.eq,
}
_SAME_VALUE = {"copy", "bitcast", "convert", "reshape"}


@dataclass(frozen=True)
class _Element:
    """Element `index` of the loop's tuple at the start of an iteration, plus `step`."""

    index: int
    step: int = 0


@dataclass(frozen=True)
class _Compare:
    direction: str
    left: object
    right: object


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often `loop`, an instruction of `computation`, runs its body; None when only the run can tell.

    XLA's own count if it prints one, else from a condition that compares a counter with a constant.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known.group(1))
    condition = module.computations[loop.attribute("condition")]
    test = _value(module, condition, condition.root, None)
    if not isinstance(test, _Compare):
        return None

    def side(value: object) -> tuple[int | None, int | None]:
        """Where one side of the comparison begins, and what an iteration adds to it."""
        if not isinstance(value, _Element):
            return (value, 0) if isinstance(value, int) else (None, None)
        start = _initial(module, computation, loop, value.index)
        return None if start is None else start + value.step, _step(module, loop, value.index)

    (left, left_step), (right, right_step) = side(test.left), side(test.right)
    if left is None or right is None or left_step is None or right_step is None:
        return None
    return _count(left, right, left_step - right_step, test.direction)


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations until the comparison of `start`, which moves by `step` against `bound`, fails."""
    if not _COMPARISONS[direction](start, bound):
        return 0
    if step == 0:
        return None
    if direction == "NE":
        trips, rest = divmod(bound - start, step)
        return trips if rest == 0 and trips >= 0 else None
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
    if direction == "EQ":
        return 1
    if (step > 0) != (direction in ("LT", "LE")):
        return None
    return math.ceil((bound - start) / step)


def _initial(module: Module, computation: Computation, loop: Instruction, index: int) -> int | None:
    """The constant that element `index` holds when the loop begins."""
    carried = computation.instructions[loop.operands[0]]
    if carried.opcode != "tuple":
        return None
    element = computation.instructions[carried.operands[index]]
    value = _value(module, computation, element, None)
    return value if isinstance(value, int) else None


def _step(module: Module, loop: Instruction, index: int) -> int | None:
    """What one iteration adds to element `index`."""
    body = module.computations[loop.attribute("body")]
    if body.root.opcode != "tuple":
        return None
    element = body.instructions[body.root.operands[index]]
    value = _value(module, body, element, None)
    return value.step if isinstance(value, _Element) and value.index == index else None


def _value(module: Module, computation: Computation, at: Instruction, arguments: list | None):
    """What `at` computes: an int, an `_Element`, a `_Compare` or None. `arguments`: those of a fusion."""
    operands = list(computation.operands(at))

    def value(i: int):
        return _value(module, computation, operands[i], arguments)

    if at.opcode == "constant":
        return int(at.arguments) if re.fullmatch(r"-?\d+", at.arguments) else None
    if at.opcode == "parameter":
        return arguments[int(at.arguments)] if arguments is not None else None
    if at.opcode == "get-tuple-element" and operands[0].opcode == "parameter" and arguments is None:
        return _Element(int(at.attribute("index")))
    if at.opcode in _SAME_VALUE:
        return value(0)
    if at.opcode in ("add", "subtract"):
        return _sum(value(0), value(1), 1 if at.opcode == "add" else -1)
    if at.opcode == "compare":
        return _Compare(at.attribute("direction"), value(0), value(1))
    if at.opcode in ("fusion", "call"):
        callee = module.computations[at.callees[0]]
        return _value(module, callee, callee.root, [value(i) for i in range(len(operands))])
    return None


def _sum(left, right, sign: int):
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Element) and isinstance(right, int):
        return _Element(left.index, left.step + sign * right)
    if isinstance(left, int) and isinstance(right, _Element) and sign == 1:
        return _Element(right.index, right.step + left)
    return None
