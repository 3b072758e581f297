"""The text of a compiled HLO module as a tree: module, computations, instructions in schedule order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_LEAF = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Leaf:
    """One array of an instruction's result: its HLO element type and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        product = 1
        for dim in self.dims:
            product *= dim
        return product

    @property
    def nbytes(self) -> int:
        return -(-self.elements * _bits(self.dtype) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line. `arguments` is what stands in the opcode's parentheses, `attributes` what follows them."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The arrays of the result; a tuple is flattened."""
        return tuple(
            Leaf(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))
            for dtype, dims in _LEAF.findall(self.shape)
        )

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.arguments))

    @property
    def base(self) -> str:
        """The opcode of the operation itself: `all-gather-start` is an `all-gather`."""
        return self.opcode.removesuffix("-start")

    @property
    def starts(self) -> bool:
        return self.opcode.endswith("-start")

    @property
    def finishes(self) -> bool:
        """Whether this is the later half (`-done`, `-update`) of something that was counted at its start."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def op_name(self) -> str:
        """The JAX name stack this instruction comes from, or ''."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def attribute(self, key: str) -> str:
        """The single name or number after `key=`; '' when absent."""
        found = re.search(rf"[, ]{key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""

    def names(self, key: str) -> tuple[str, ...]:
        """The names in `key={%a, %b}`, or the one in `key=%a`."""
        found = re.search(rf"[, ]{key}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return tuple(_NAME.findall(found.group(1))) if found else ()

    def numbers(self, key: str) -> tuple[int, ...]:
        """The numbers in `key={1,2}`; () when absent."""
        found = re.search(rf"[, ]{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(n) for n in found.group(1).split(",") if n) if found else ()

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, of which one runs."""
        named = self.names("branch_computations")
        return named or self.names("true_computation") + self.names("false_computation")

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that run once when this instruction does. Reducers (`to_apply`) are no calls."""
        if self.base == "call":
            return self.names("to_apply") or self.names("calls")
        return self.names("calls") + self.names("called_computations")


@dataclass
class Computation:
    """Instructions by name, in the order in which they are scheduled."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """The operands that this computation defines."""
        return (self.instructions[n] for n in instruction.operands if n in self.instructions)

    def operand_bytes(self, instruction: Instruction) -> int:
        return sum(leaf.nbytes for operand in self.operands(instruction) for leaf in operand.leaves)


@dataclass
class Module:
    """A compiled program. `partitions` is the number of devices that run it; `tables`: the text before the first
    computation."""

    computations: dict[str, Computation]
    entry: str
    partitions: int
    tables: str = ""


def parse_module(text: str) -> Module:
    """Reads `compiled.as_text()` of one module. Raises ValueError when there is no ENTRY computation."""
    computations: dict[str, Computation] = {}
    current, entry = None, None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                current = computations[header.group(2)] = Computation(header.group(2))
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif instruction := _parse_instruction(line):
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("this text has no ENTRY computation: pass compiled.as_text()")
    partitions = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    tables = text[: text.find("{\n", text.find("\n"))]
    return Module(computations, entry, int(partitions.group(1)) if partitions else 1, tables)


def _parse_instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None  # a further line of a constant
    start = head.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    return Instruction(
        name=head.group(2),
        shape=line[start:shape_end],
        opcode=opcode.group(1),
        arguments=line[opcode.end() : end - 1],
        attributes=line[end:],
        is_root=bool(head.group(1)),
    )


def _closing(line: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`; the line's end if none does."""
    depth = 0
    for position in range(start, len(line)):
        if line[position] == "(":
            depth += 1
        elif line[position] == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    return len(line)


def _bits(dtype: str) -> int:
    width = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4: the first number is the width
    return _BITS[dtype] if dtype in _BITS or width is None else int(width.group())
