"""What a config of data may declare: the rules that all kinds share, and one error for every value that breaks one."""

from collections.abc import Iterable
from typing import Any

from jaxpar.errors import ConfigError

_AT_LEAST_1 = ("rows", "row_length", "train_rows", "limit_bytes", "eval_rows")


def refuse(kind: str, config: Any, wrong: Iterable[tuple[str, str]] = ()) -> None:
    """Raises ConfigError with every impossible value at once.

    `wrong`: (name, what it must be) for the rules of this kind alone.
    """
    problems = [f"{name} must be {need}, found {getattr(config, name)!r}" for name, need in (*wrong, *_shared(config))]
    if problems:
        raise ConfigError(f"{kind}: " + "; ".join(problems))


def _shared(config: Any) -> Iterable[tuple[str, str]]:
    for name in _AT_LEAST_1:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            yield name, "at least 1"
    if not 0 < getattr(config, "held_out", 0.5) < 1:
        yield "held_out", "a fraction between 0 and 1, both excluded"
    if not 0 <= config.seed < 2**32:
        yield "seed", "from 0 to 2**32 - 1"


def wrong_files(config: Any) -> Iterable[tuple[str, str]]:
    """The rules for `paths`, `suffixes` and `exclude`."""
    if isinstance(config.paths, str) or not config.paths:
        yield "paths", "a tuple of at least one path"
    if isinstance(config.suffixes, str) or not all(suffix.startswith(".") for suffix in config.suffixes):
        yield "suffixes", "a tuple of suffixes that begin with a dot"
    if isinstance(config.exclude, str):
        yield "exclude", "a tuple of patterns"
