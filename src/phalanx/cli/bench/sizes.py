"""Sizes and times as people write them: `64K`, `8..64M`, `12.3 µs`."""

from __future__ import annotations

import re

from phalanx.errors import ConfigError

__all__ = ["parse_sizes", "show_bytes", "show_ratio", "show_seconds", "show_size"]

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SIZE = re.compile(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_STEP = 8
"""`A..B` grows by this factor: fine enough to see where an algorithm changes, coarse enough to finish."""


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is not a size (expected bytes, as 8, 16K, 64M or 64MiB)")
    return int(match[1]) << _UNITS[match[2].upper()]


def parse_sizes(text: str) -> list[int]:
    """`8,1K,64M` is a list, `8..64M` every size from one to the other by factors of eight, the last one included.

    Raises:
        ConfigError: It is neither.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not dots:
            sizes.add(_parse_size(part))
            continue
        low, high = _parse_size(first), _parse_size(last)
        if low > high:
            raise ConfigError(f"{part!r} is not a range of sizes (the first is larger than the last)")
        while low < high:
            sizes.add(low)
            low *= _STEP
        sizes.add(high)
    return sorted(sizes)


def show_size(size: int) -> str:
    """A size of an array, exact: `16 KiB`, `100 B`; a dash where there is no array."""
    if size == 0:
        return "-"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def show_bytes(size: float) -> str:
    """An amount of memory, rounded."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(size) >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            value = seconds * factor
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    raise AssertionError


def show_ratio(value: float) -> str:
    """Two decimals where they matter, and never 0.00."""
    digits = 3 if value < 0.1 else 2 if value < 9.995 else 1
    return f"{value:,.{digits}f}"
