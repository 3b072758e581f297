"""How many bytes are alive at once while XLA runs a traced piece of the step.

XLA fuses what works element by element into the kernel that needs it: such a value is never in memory, but what it is
made from stays until then. In memory are results and operands of matrix products, reductions' results, what loops and
collectives take and give, and what is used again and takes fewer bytes than what it is made of.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpar.estimate.kernels import COPY, Kernel, Kernels, kernels_of
from jaxpar.estimate.tensor_split import Dim

# What is no kernel of its own, beside arithmetic: it only moves.
_VIEWS = frozenset(
    {
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "pvary",
        "name",
        "copy",
        "copy_p",
        "pcast",
        "sharding_constraint",
    }
)
_APART = frozenset({
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "top_k", "gather", "scatter", "scatter-add",
    "scatter_add", "cumsum", "cumlogsumexp", "cummax", "ragged_dot", "ragged_dot_general", "reshard", "all_gather",
    "all_gather_invariant", "psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter", "all_to_all",
    "ragged_all_to_all", "ppermute", "pmax", "device_put", "optimization_barrier", "custom_call", "pallas_call",
    "reduce_precision",
})  # fmt: skip
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
_COSTLY = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "rsqrt", "sqrt", "div", "pow", "erf",
})  # fmt: skip
_EPILOGUES = ("convert_element_type", "add", "add_any")
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Platform:
    """What XLA for it does of its own.

    Attributes:
      epilogues: a matrix product may add to what is there, and change dtype, as it writes.
      recomputes: what is costly, such as an exponential, is computed by each kernel that reads it; else it is stored.
      defers: products that no one waits for, those of the weights' gradients, are put over the communication of
        `tensor`, at the end of the layer.
      widens: products of the weights' gradients take bfloat16 as float32 copies.
    """

    epilogues: bool = True
    recomputes: bool = True
    defers: bool = True
    widens: bool = False


CUDA, CPU = Platform(), Platform(epilogues=False, recomputes=False, defers=False, widens=True)


@dataclass(frozen=True)
class Piece:
    """A traced piece. `most`: bytes alive at once beside its inputs, its results included. `dims`: which dim of each
    result `tensor` splits. `buffers`: a number for each result, alike for those that are the same values.
    `reads`: whether an input is needed."""

    most: int
    dims: list[Dim]
    buffers: list[int]
    reads: list[bool]


def piece(closed: Any, dims: list[Dim], tensor: int, platform: Platform, sunk: Collection[int] = ()) -> Piece:
    """`closed`: a jaxpr; `dims`: which dim of each input `tensor` devices split. `sunk`: results that are gone as
    soon as they are made."""

    def inner(body: Kernels, consts: int, carried: int) -> int:
        return _Alive(body, platform, in_place=range(carried), first=consts).most

    program, of_results = kernels_of(closed, dims, tensor, inner, platform.widens)
    alive = _Alive(program, platform, sunk=sunk, late=sunk if platform.defers and tensor > 1 else ())
    most = alive.most
    same, reads = [alive.buffer.get(n, n) for n in program.outs], [alive.uses[n] > 0 for n in program.ins]
    return Piece(most, of_results, same, reads)


@dataclass
class _Alive:
    """`sunk`: results that are gone at once; `late`: those made when all others are. `in_place`: results that are
    written over inputs, those from `first` on."""

    program: Kernels
    platform: Platform
    sunk: Collection[int] = ()
    late: Collection[int] = ()
    in_place: Collection[int] = ()
    first: int = 0
    # By value: when it is written, and when it was last read.
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    # What a value in no memory is made of.
    made_of: dict[int, frozenset[int]] = field(default_factory=dict)
    # What a value was made of when it was stored.
    sources: dict[int, frozenset[int]] = field(default_factory=dict)
    # Values in another's buffer.
    buffer: dict[int, int] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Those whose results are used."""
        outs = self.program.outs
        soon = self._needed([n for i, n in enumerate(outs) if i not in self.late])
        at_once = set(map(id, soon))
        return soon + [kernel for kernel in self._needed(outs) if id(kernel) not in at_once]

    def _needed(self, outs: Sequence[int]) -> list[Kernel]:
        needed, found = set(outs), []
        for kernel in reversed(self.program.kernels):
            if needed & set(kernel.outs):
                needed |= set(kernel.ins)
                found.append(kernel)
        return found[::-1]

    @cached_property
    def uses(self) -> Counter[int]:
        return Counter(n for kernel in self.kernels for n in set(kernel.ins)) + Counter(self.program.outs)

    @cached_property
    def most(self) -> int:
        for n in self.program.ins:
            self.buffer[n] = n
        for at, kernel in enumerate(self.kernels):
            self._run(at, kernel)
        end = len(self.kernels)
        for i, n in enumerate(self.program.outs):
            if self._constant(n):
                continue
            if i in self.sunk:
                self._use(n, self.written.get(self.buffer.get(n, n), end - 1))
            elif not (i in self.in_place and self._over(i, n)):
                self._keep(n, end)
        return self._sweep(end)

    def _over(self, i: int, n: int) -> bool:
        """Whether a result carried round a loop is written over what it replaces."""
        old = self.program.ins[self.first + i]
        return self.buffer.get(n) == old or (n not in self.buffer and old in self.made_of.get(n, ()))

    def _run(self, at: int, kernel: Kernel) -> None:
        if kernel.name in _IN_PLACE:
            self._update(at, kernel)
        elif kernel.name == COPY:
            self._fuse(at, kernel)
            self._store(kernel.outs[0], at)
        elif kernel.name in _APART:
            for n in kernel.ins:
                self._keep(n, at)
            self._results(at, kernel)
        elif kernel.name.startswith(("reduce_", "argm")):
            for n in kernel.ins:
                self._use(n, at)
            self._results(at, kernel)
        else:
            self._fuse(at, kernel)

    def _results(self, at: int, kernel: Kernel) -> None:
        if kernel.name in _PRODUCTS and self.platform.epilogues and self._ends_in_sum(kernel.outs[0]):
            self.made_of[kernel.outs[0]] = frozenset().union(*(self._roots(n) for n in kernel.ins))
            return
        for n in kernel.outs:
            self.buffer[n], self.written[n] = n, at
            self.read.setdefault(n, at)

    def _ends_in_sum(self, n: int) -> bool:
        """Whether a product is only cast, or added to something: its kernel then writes that."""
        user = self._only_user(n)
        while user is not None and user.name in _VIEWS:
            user = self._only_user(user.outs[0])
        return user is not None and user.name in _EPILOGUES

    def _only_user(self, n: int) -> Kernel | None:
        return self._users[n][0] if self.uses[n] == 1 and self._users[n] else None

    @cached_property
    def _users(self) -> dict[int, list[Kernel]]:
        found: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            for n in set(kernel.ins):
                found[n].append(kernel)
        return found

    def _update(self, at: int, kernel: Kernel) -> None:
        target, *rest = kernel.ins
        for n in rest:
            self._use(n, at)
        if self._constant(target):
            self._results(at, kernel)
            return
        self._keep(target, at)
        self.buffer[kernel.outs[0]] = self.buffer[target]

    def _fuse(self, at: int, kernel: Kernel) -> None:
        made = frozenset().union(*(self._roots(n) for n in kernel.ins))
        for n in kernel.outs:
            if self._moves_only(kernel) and kernel.ins[0] in self.buffer:
                self.buffer[n] = self.buffer[kernel.ins[0]]
                continue
            self.made_of[n] = made
            large = [r for r in made if self.program.bytes[r] >= self.program.bytes[n] // 2]
            costly = kernel.name in _COSTLY and not self.platform.recomputes
            if self.uses[n] > 1 and (len(large) > 1 or costly):
                self._store(n, at)

    def _moves_only(self, kernel: Kernel) -> bool:
        """Padding by nothing, or a slice that is all, too."""
        whole = kernel.name in ("pad", "slice") and self._size(kernel.ins[0]) == self._size(kernel.outs[0])
        return kernel.name in _VIEWS or whole

    def _size(self, n: int) -> int:
        return self.program.bytes[n]

    def _roots(self, n: int) -> frozenset[int]:
        """The buffers that a value is read from."""
        return frozenset((self.buffer[n],)) if n in self.buffer else self.made_of.get(n, frozenset())

    def _use(self, n: int, at: int) -> None:
        for root in self._roots(n):
            self.read[root] = max(self.read.get(root, at), at)

    def _constant(self, n: int) -> bool:
        """Whatever reads it makes it itself."""
        return n not in self.buffer and not self.made_of.get(n)

    def _keep(self, n: int, at: int) -> None:
        """In memory, until then at least."""
        if not self._constant(n):
            self._store(n, at)
            self.read[self.buffer[n]] = at

    def _store(self, n: int, at: int) -> None:
        """Puts a fused value into memory, written by a kernel of its own."""
        if n not in self.buffer:
            self._use(n, at)
            self.sources[n] = self._roots(n)
            self.buffer[n], self.written[n] = n, at
            self.read[n] = at

    def _sweep(self, end: int) -> int:
        """Adds up what is alive at each kernel; inputs are not counted."""
        change, taken = [0] * (end + 3), set[int]()
        for n, start in self.written.items():
            if (old := self._dying(n, start, taken)) is not None:
                taken.add(old)
                start += 1
            change[start] += self.program.bytes[n]
            change[max(start, self.read.get(n, start)) + 1] -= self.program.bytes[n]
        alive = most = 0
        for at in range(end + 1):
            alive += change[at]
            most = max(most, alive + (self._inner(at) if at < end else 0))
        return most

    def _dying(self, n: int, at: int, taken: Collection[int]) -> int | None:
        """A buffer as large that ends where `n`, made element by element, begins: it is written over."""
        alike = (r for r in self.sources.get(n, ()) if r in self.written and self.read.get(r) == at and r not in taken)
        return next((r for r in alike if self.program.bytes[r] == self.program.bytes[n]), None)

    def _inner(self, at: int) -> int:
        """A loop's own, less what it carries in buffers that nobody needs later: it works in those."""
        kernel = self.kernels[at]
        if kernel.name not in ("scan", "while"):
            return kernel.inner
        dying = Counter(
            self.program.bytes[b]
            for n in kernel.ins
            if self.read.get(b := self.buffer.get(n, n)) == at and b in self.written
        )
        fresh = Counter(self.program.bytes[n] for n in kernel.outs)
        return kernel.inner - sum(size * count for size, count in (dying & fresh).items())
