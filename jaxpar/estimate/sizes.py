"""Bytes as a person reads and writes them."""

import re

from jaxpar.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}


def size(count: int) -> str:
    """`1536` -> `1.50 KiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def parse_size(text: str) -> int:
    """`80GB`, `74.5GiB`, `85100068864` -> bytes. Raises ConfigError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if found is None or found.group(2).lower() not in units or float(found.group(1)) == 0:
        raise ConfigError(f"size {text!r}: needs a number above 0 and a unit, such as GB (10^9 bytes) or GiB")
    return round(float(found.group(1)) * units[found.group(2).lower()])
