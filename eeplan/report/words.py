"""Numbers in words: one way to write seconds, bytes and errors on the whole page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eeplan.plan import PathCount
from eeplan.report.compare import Unit

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
MISSING = "\N{EN DASH}"

_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def time_unit(seconds: float) -> tuple[str, float]:
    """Name and size in seconds of the unit that shows ``seconds`` with one to three digits in front."""
    return next((unit for unit in _TIME_UNITS if abs(seconds) >= unit[1]), _TIME_UNITS[-1])


def size_unit(size_bytes: float) -> tuple[str, int]:
    """Name and size in bytes of the unit that suits ``size_bytes``."""
    return next((unit for unit in _SIZE_UNITS if abs(size_bytes) >= unit[1]), _SIZE_UNITS[-1])


def number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without exponent: 1.23, 12.3, 1,234."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}".replace("-", MINUS)


def seconds(value: float, unit: tuple[str, float] | None = None) -> str:
    """A duration: ``1.23 s``, ``45.6 ms``; in ``unit`` when given, to line up with a neighbour."""
    name, scale = unit or time_unit(value)
    return f"{number(value / scale)}{THIN}{name}" if value else f"0{THIN}{name}"


def size(value: float, unit: tuple[str, int] | None = None) -> str:
    """A number of bytes: ``64.0 MiB``."""
    name, scale = unit or size_unit(value)
    return f"{number(value / scale)}{THIN}{name}" if value else f"0{THIN}{name}"


def percent(fraction: float, places: int = 1) -> str:
    """A share without sign: ``12.3 %``."""
    return f"{fraction * 100:.{places}f}{THIN}%".replace("-", MINUS)


def signed_percent(fraction: float | None, places: int = 1) -> str:
    """An error with its sign: ``+1.6 %``, ``−1.6 %``; a dash where there is none."""
    if fraction is None:
        return MISSING
    return f"{fraction * 100:+.{places}f}{THIN}%".replace("-", MINUS)


def quantity(value: float, unit: Unit, like: float | None = None) -> str:
    """``value`` in the unit that suits ``like`` (itself by default), so that pairs read in one unit."""
    scale = value if like is None else like
    if unit == "s":
        return seconds(value, time_unit(scale))
    if unit == "bytes":
        return size(value, size_unit(scale))
    return percent(value) if unit == "fraction" else f"{number(value)}{THIN}tokens/s"


def times(count: PathCount) -> str:
    """``64``, or ``1 to 64`` where critical paths of equal length differ."""
    return f"{count.least:,}" if count.least == count.most else f"{count.least:,} to {count.most:,}"


def listing(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """``1 layer``, ``4 layers``; ``nouns`` for a plural that is not just an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
