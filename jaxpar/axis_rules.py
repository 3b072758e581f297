"""Logical dim names -> mesh axes: the one table, its conflicts, and what divides."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec as P

from jaxpar.mesh import AXES

# The positions of a normed activation: over `tensor` when norms are sequence-sharded.
NORM_POSITIONS = "norm_positions"

# What each logical name of a parameter's dim means for the mesh. None: not split by a rule (ZeRO may still).
DEFAULT_RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "embed": None,
    "head_dim": None,
    "positions": None,
}

# A dim that does not divide: "pad" stores it padded and shows it logically, "refuse" makes the plan illegal,
# "replicate" is legal only if the axis is a multiple of the dim (each device then uses one of the copies).
DEFAULT_UNEVEN: Mapping[str, str] = {"vocab": "pad", "kv_heads": "replicate"}

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class AxisRules:
    """The table from logical names to mesh axes, and what to do with a dim that does not divide."""

    axes: Mapping[str, str | None] = field(default_factory=lambda: DEFAULT_RULES)
    uneven: Mapping[str, str] = field(default_factory=lambda: DEFAULT_UNEVEN)

    def axis(self, name: str | None) -> str | None:
        """The mesh axis of a logical name (a mesh axis' own name stands for itself). `KeyError` if unknown."""
        if name is None:
            return None
        if name in AXES:
            return name
        return self.axes[name]

    def problems(self, path: str, names: Names) -> list[str]:
        """What is wrong with a parameter's names: unknown ones, and two on one mesh axis."""
        known = [*self.axes, *AXES]
        found = []
        for name in names:
            if name is not None and name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(sorted(self.axes))}"
                found.append(f"{path} has the unknown logical name {name!r}; {hint}")
        by_axis: dict[str, list[str]] = {}
        for name in names:
            if name in known and (axis := self.axis(name)) is not None:
                by_axis.setdefault(axis, []).append(str(name))
        for axis, clashing in by_axis.items():
            if len(clashing) > 1:
                found.append(
                    f"{path} {names} puts {' and '.join(map(repr, clashing))} on the one mesh axis {axis!r}; "
                    f"a parameter can use an axis once: rename one of the dims"
                )
        return found

    def spec(self, names: Names) -> P:
        """The `PartitionSpec` of the rules alone, before ZeRO."""
        return P(*(self.axis(n) for n in names))


def next_multiple(size: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `size`."""
    return -(-size // of) * of
