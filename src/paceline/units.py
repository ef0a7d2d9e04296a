"""Sizes, rates and durations: what people write (64MB, 500mbit, 20ms) and what the code computes with.

Sizes are decimal (1 KB = 1000 B) unless written with an i (1 KiB = 1024 B). Rates are bits a second when
written with ``bit`` and bytes a second when written with ``B``: ``500mbit``, ``10Gbit/s``, ``3.2GB/s``.
"""

from __future__ import annotations

import math
import re

from paceline.errors import UsageError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?|\.[0-9]+)\s*([A-Za-zµ/]*)\s*")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a {what}; write it like {example}")
    number = float(match.group(1))
    if not math.isfinite(number):
        raise UsageError(f"{text!r} is too large for a {what}")
    return number, match.group(2)


def parse_size(text: str) -> int:
    """Bytes: ``parse_size("64MB") == 64_000_000``, ``parse_size("4KiB") == 4096``."""
    number, unit = _split(text, "size", "64MB, 4KiB or 1000")
    prefix = unit.lower().removesuffix("b")
    factor = _DECIMAL.get(prefix) or _BINARY.get(prefix)
    if factor is None or unit.lower() == "bit":
        raise UsageError(f"{text!r} is not a size; write it like 64MB, 4KiB or 1000")
    size = round(number * factor)
    if size > 2**60:
        raise UsageError(f"{text!r} is too large for a size")
    return size


def parse_rate(text: str) -> float:
    """Bytes a second: ``parse_rate("500mbit") == 62_500_000.0``, ``parse_rate("3GB/s") == 3e9``."""
    number, unit = _split(text, "rate", "500mbit, 10Gbit/s or 3.2GB/s")
    unit = unit.removesuffix("/s")
    if unit.lower().endswith(("bit", "bps")):
        prefix, divisor = unit.lower()[:-3], 8.0
    elif unit.endswith("B"):
        prefix, divisor = unit[:-1].lower(), 1.0
    else:
        prefix, divisor = "?", 1.0
    factor = _DECIMAL.get(prefix) or _BINARY.get(prefix)
    if factor is None or number <= 0:
        raise UsageError(f"{text!r} is not a rate; write it like 500mbit, 10Gbit/s or 3.2GB/s")
    return number * factor / divisor


def parse_duration(text: str) -> float:
    """Seconds: ``parse_duration("500ms") == 0.5``. A unit is required, as 500 could be anything."""
    number, unit = _split(text, "duration", "500ms, 20us or 1.5s")
    if unit not in _SECONDS:
        raise UsageError(f"{text!r} is not a duration; write it like 500ms, 20us or 1.5s")
    return number * _SECONDS[unit]


def format_size(size_bytes: float) -> str:
    """``64 MB``, three significant digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"


def format_duration(seconds: float) -> str:
    """``1.95 s``, ``12.3 ms``, ``40 us``: three significant digits."""
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor * 0.9995:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def format_rate(bytes_per_s: float) -> str:
    """``500 Mbit/s``."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bytes_per_s * 8 >= factor:
            return f"{bytes_per_s * 8 / factor:.4g} {unit}"
    return f"{bytes_per_s * 8:.4g} bit/s"
