"""Groups of parameters by their paths: another learning rate, another decay, frozen."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any

import tyro

from jaxpar.errors import ConfigError
from jaxpar.structure import ParamInfo
from jaxpar.training.matrices import decays


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose path matches `pattern`, e.g. `embedding`, `*.bias`, `blocks.attention.*`.

    Attributes:
      pattern: `*` stands for any part of a path, dots included; of several groups that match, the first counts.
      learning_rate: times that of the optimizer; also scales the decay, which is multiplied by the rate.
      weight_decay: in place of the optimizer's rule; None: the rule of `jaxpar.training.matrices`.
      frozen: never changes, has no optimizer state, and does not count in the norm that is clipped.
    """

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or (self.weight_decay or 0.0) < 0:
            raise ConfigError(f"the group {str(self)!r}: learning_rate and weight_decay must be 0 or more")

    def __str__(self) -> str:
        """As `parse` reads it."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        parts = [name if value is True else f"{name}={value}" for name, value in changed.items() if name != "pattern"]
        return ":".join([self.pattern, ",".join(parts)] if parts else [self.pattern])

    @classmethod
    def parse(cls, text: str) -> "ParameterGroup":
        """From `PATTERN:learning_rate=0.5,weight_decay=0` or `PATTERN:frozen`. Raises `ConfigError`."""
        pattern, _, rest = text.partition(":")
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            name, _, value = (piece.strip() for piece in part.partition("="))
            values[name.replace("-", "_")] = _value(text, name.replace("-", "_"), value)
        if not pattern or not values:
            raise ConfigError(f"the group {text!r} needs a pattern, a colon and what holds for it: {_FORM}")
        return cls(pattern, **values)


_FORM = "PATTERN:learning_rate=0.5,weight_decay=0 or PATTERN:frozen"


def _value(group: str, name: str, value: str) -> float | bool:
    if name == "frozen" and not value:
        return True
    try:
        if name in ("learning_rate", "weight_decay"):
            return float(value)
    except ValueError:
        pass
    raise ConfigError(f"the group {group!r}: {name}={value} is nothing that it can have; write {_FORM}")


# On a command line each group is one word.
Groups = Annotated[
    tuple[ParameterGroup, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[PATTERN:KEY=VALUE,... ...]",
        instance_from_str=lambda words: tuple(map(ParameterGroup.parse, words)),
        is_instance=lambda groups: isinstance(groups, tuple),
        str_from_instance=lambda groups: list(map(str, groups)),
    ),
]


@dataclass(frozen=True)
class Settings:
    """What holds for one parameter."""

    learning_rate: float
    weight_decay: float
    frozen: bool


def settings(
    params: Mapping[str, ParamInfo], groups: Sequence[ParameterGroup], weight_decay: float
) -> dict[str, Settings]:
    """For every parameter. Raises `ConfigError` naming each pattern that no path matches, and if all are frozen."""
    _check(params, groups)
    found = {}
    for path, info in params.items():
        group = next((g for g in groups if fnmatchcase(path, g.pattern)), ParameterGroup(path))
        decay = (weight_decay if decays(info) else 0.0) if group.weight_decay is None else group.weight_decay
        found[path] = Settings(group.learning_rate, decay, group.frozen)
    if all(s.frozen for s in found.values()):
        raise ConfigError("optimizer: the groups freeze every parameter; nothing would be trained")
    return found


def _check(params: Mapping[str, ParamInfo], groups: Sequence[ParameterGroup]) -> None:
    problems = []
    for pattern in (g.pattern for g in groups):
        if not any(fnmatchcase(path, pattern) for path in params):
            near = difflib.get_close_matches(pattern, params, n=1, cutoff=0.3)
            problems.append(f"the group {pattern!r} matches no parameter" + "".join(f" (near {n!r})" for n in near))
    if problems:
        raise ConfigError(f"optimizer: {'; '.join(problems)}. There are: {', '.join(params)}")
