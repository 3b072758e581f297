"""The best way for every operation of a layer at once, as an integer program.

One choice per parameter (a dim that is split, or none) and per operation (`ways`). As much of the parameters as can be
is split without gathering anything; of the layouts that do so, the one whose sums over `tensor` move the fewest bytes.
Follows Zheng et al., Alpa (2022), whose resharding between any two layouts is cut down to sums: a gather in a layer is
what a layout is to avoid.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from jaxpar.annotate.flat import Flat, Operation, Value
from jaxpar.annotate.trace import Routed
from jaxpar.annotate.ways import ANY, GRADIENT_IN_PARTS, PARTS, WHOLE, State, Way, ways
from jaxpar.errors import ModelError

# Of a layer's parameters, what part is as bad to keep whole as all sums of the layer together are to make.
_WORTH = 0.01


@dataclass(frozen=True)
class Solution:
    """`split`: which dim of each argument is split, of those that are parameters. `moved`: bytes of the sums of one
    layer, forward and backward, as a device sends them. `sums`: what is summed: (value, forward?)."""

    split: tuple[int | None, ...]
    moved: float
    sums: tuple[tuple[Value, bool], ...]
    chosen: tuple[tuple[Operation, Way], ...]


@dataclass
class Layout:
    """The integer program of one layer. `parameters`: how many of its first arguments are parameters."""

    flat: Flat
    parameters: int
    tensor: int
    routed: Sequence[Routed]
    _costs: list[float] = field(default_factory=list)
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    _whole_numbers: list[int] = field(default_factory=list)

    def solve(self, forced: Mapping[int, int | None]) -> Solution | None:
        """`forced`: dims of some parameters. None if there is no such layout."""
        self._costs, self._rows, self._whole_numbers = [], [], []
        states = self._parameters(forced)
        chosen: list[tuple[Operation, list[Way], list[int]]] = []
        partial: dict[tuple[int, State], int] = {}
        for op in self.flat.operations:
            found = ways(op, self.tensor, self.routed)
            variables = [self._variable(0.0, whole=True) for _ in found]
            self._one(variables)
            chosen.append((op, found, variables))
            for value in op.outs:
                by_state = _by(variables, [way.out for way in found])
                states[id(value)] = by_state
            for at, value in enumerate(op.ins):
                self._meet(value, states, _by(variables, [way.ins[at] for way in found]), partial)
        for value in self.flat.outs:
            last = self._variable(0.0)
            self._one([last])
            self._meet(value, states, {WHOLE: [last]}, partial)
        x = self._minimum()
        return None if x is None else self._read(x, states, chosen, partial)

    def _parameters(self, forced: Mapping[int, int | None]) -> dict[int, dict[State, list[int]]]:
        """What each argument may be, with the price of what stays whole."""
        mine = self.flat.ins[: self.parameters]
        total = sum(prod(v.shape) for v in mine) or 1
        found: dict[int, dict[State, list[int]]] = {}
        for i, value in enumerate(self.flat.ins):
            options: list[State] = [WHOLE]
            if i < self.parameters:
                options += [d for d, size in enumerate(value.shape) if size and size % self.tensor == 0]
            if i in forced:
                options = [s for s in options if s == (WHOLE if forced[i] is None else forced[i])]
            price = prod(value.shape) / total / _WORTH if i < self.parameters else 0.0
            variables = {s: [self._variable(price if s == WHOLE else 0.0, whole=True)] for s in options}
            self._one([v for vs in variables.values() for v in vs])
            found[id(value)] = variables
        return found

    def _meet(
        self,
        value: Value,
        states: Mapping[int, dict[State, list[int]]],
        wanted: Mapping[State, list[int]],
        partial: dict[tuple[int, State], int],
    ) -> None:
        """A value lies as whoever reads it wants it, but that parts are added up, and gradients in parts too."""
        if value.constant or id(value) not in states:
            return
        given = states[id(value)]
        out_of, into = defaultdict[State, list[int]](list), defaultdict[State, list[int]](list)
        for a in given:
            for b in wanted:
                if b == a or (a in (WHOLE, PARTS) and b in (WHOLE, GRADIENT_IN_PARTS)) or ANY in (a, b):
                    edge = self._variable(0.0)
                    out_of[a].append(edge)
                    into[b].append(edge)
                    if a == PARTS and b != PARTS:
                        self._pays(value, PARTS, edge, partial)
                    if b == GRADIENT_IN_PARTS:
                        self._pays(value, GRADIENT_IN_PARTS, edge, partial)
        for a, variables in given.items():
            self._equal(out_of[a], variables)
        for b, variables in wanted.items():
            self._equal(into[b], variables)

    def _pays(self, value: Value, what: State, edge: int, partial: dict[tuple[int, State], int]) -> None:
        """Once, however many read it."""
        key = (id(value), what)
        if key not in partial:
            partial[key] = self._variable(self._sum(value) / self._scale)
        self._rows.append(({partial[key]: 1.0, edge: -1.0}, 0.0, np.inf))

    def _sum(self, value: Value) -> float:
        """Bytes that a device sends in an all-reduce."""
        differentiable = np.issubdtype(value.dtype, np.inexact) or str(value.dtype) == "bfloat16"
        return 2 * (self.tensor - 1) / self.tensor * value.bytes if differentiable else 0.0

    @property
    def _scale(self) -> float:
        """All that one would ever sum: what goes through the layers, a few times."""
        return 4 * max((self._sum(v) for v in self.flat.outs), default=0.0) or 1.0

    # -- the program as numbers --

    def _variable(self, cost: float, whole: bool = False) -> int:
        self._costs.append(cost)
        self._whole_numbers.append(int(whole))
        return len(self._costs) - 1

    def _one(self, variables: Sequence[int]) -> None:
        self._rows.append((dict.fromkeys(variables, 1.0), 1.0, 1.0))

    def _equal(self, left: Sequence[int], right: Sequence[int]) -> None:
        row = dict.fromkeys(left, 1.0)
        for v in right:
            row[v] = row.get(v, 0.0) - 1.0
        self._rows.append((row, 0.0, 0.0))

    def _minimum(self) -> np.ndarray | None:
        at = [(i, v, c) for i, (row, _, _) in enumerate(self._rows) for v, c in row.items()]
        rows, columns, values = (np.array(x) for x in zip(*at, strict=True))
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self._rows), len(self._costs)))
        limits = LinearConstraint(matrix, [low for _, low, _ in self._rows], [high for _, _, high in self._rows])
        found = milp(self._costs, constraints=limits, integrality=self._whole_numbers, bounds=Bounds(0, 1))
        if found.status not in (0, 2):
            raise ModelError(f"no layout was found for a layer: {found.message}")
        return None if found.x is None else found.x

    def _read(self, x, states, chosen, partial) -> Solution:  # type: ignore[no-untyped-def]
        def state(value: Value) -> State:
            return next(s for s, variables in states[id(value)].items() if any(x[v] > 0.5 for v in variables))

        split = tuple(s if isinstance(s := state(v), int) else None for v in self.flat.ins[: self.parameters])
        values = {id(v): v for op in self.flat.operations for v in (*op.ins, *op.outs)}
        sums = tuple((values[n], what == PARTS) for (n, what), v in partial.items() if x[v] > 0.5)
        picked = tuple(
            (op, next(way for way, v in zip(found, variables, strict=True) if x[v] > 0.5))
            for op, found, variables in chosen
        )
        return Solution(split, sum(self._sum(value) for value, _ in sums), sums, picked)


def _by(variables: Sequence[int], states: Sequence[State]) -> dict[State, list[int]]:
    found: dict[State, list[int]] = {}
    for variable, state in zip(variables, states, strict=True):
        found.setdefault(state, []).append(variable)
    return found
