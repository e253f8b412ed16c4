"""Bytes as people write them: 24GiB is 24 * 2**30, 24GB is 24e9, and a bare 24 is a question, not an answer."""

from __future__ import annotations

import re

from adafrugal.core.errors import ConfigError

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
    **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
}
_EXACT = {name.lower(): size for name, size in UNITS.items()}


def parse_bytes(text: str, setting: str) -> int:
    """Read a number with its unit.

    Args:
        text: Such as ``"24GiB"``, ``"1.5 GB"`` or ``"512 MiB"``; capitals do not matter.
        setting: The option as the user wrote it, for errors.

    Returns:
        Bytes, rounded down.

    Raises:
        ConfigError: Without a unit, with an unknown one, or for less than one byte.

    Example:
        >>> parse_bytes("24GiB", "--memory") == 24 * 2**30, parse_bytes("24 GB", "--memory") == 24 * 10**9
        (True, True)
    """
    allowed = f"a number with one of {', '.join(UNITS)}"
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise ConfigError(f"{setting} {text}", text, allowed, "Write, for example, 24GiB.")
    number, unit = found.groups()
    if not unit:
        raise ConfigError(
            f"{setting} {text}",
            f"{number} without a unit",
            allowed,
            f"Write {number}GiB for {number} * 2**30 bytes, as memory is sold, or {number}GB for {number} * 10**9.",
        )
    if unit.lower() not in _EXACT:
        raise ConfigError(f"{setting} {text}", f"the unit {unit}", allowed, "Write, for example, 24GiB.")
    size = int(float(number) * _EXACT[unit.lower()])
    if size < 1:
        raise ConfigError(f"{setting} {text}", text, "at least one byte", "Write, for example, 24GiB.")
    return size


def format_bytes(size: float) -> str:
    """Bytes for people, with the largest binary unit that they fill.

    Example:
        >>> format_bytes(25769803776), format_bytes(1500), format_bytes(-3 * 2**20)
        ('24.00 GiB', '1.46 KiB', '-3.00 MiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= UNITS[unit]:
            return f"{size / UNITS[unit]:.2f} {unit}"
    return f"{size:.0f} B"
