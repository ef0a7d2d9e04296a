"""What people write, and what it means."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.units import format_duration, format_rate, format_size, parse_duration, parse_rate, parse_size

SIZES = {"64MB": 64_000_000, "4KiB": 4096, "1000": 1000, "1.5 GB": 1_500_000_000, "0": 0, "2m": 2_000_000, "1B": 1}
RATES = {"500mbit": 62.5e6, "10Gbit/s": 1.25e9, "3.2GB/s": 3.2e9, "100Mbps": 12.5e6, "1kbit": 125}
SHOWN = {0: "0 s", 2: "2 s", 0.5: "500 ms", 1.23456e-3: "1.23 ms", 20e-6: "20 us", 5e-9: "5 ns", 1234: "1234 s"}


def test_sizes() -> None:
    for text, size in SIZES.items():
        assert parse_size(text) == size


def test_rates() -> None:
    for text, rate in RATES.items():
        assert parse_rate(text) == pytest.approx(rate)


def test_durations() -> None:
    for text, seconds in {"500ms": 0.5, "20us": 20e-6, "1.5s": 1.5, "3ns": 3e-9, "2min": 120}.items():
        assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "64 furlongs", "1e999", "nan", "inf", "64bit", "1e9TB", "0x10"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "500", "500m", "0mbit", "-3mbit", "nanbit", "1e999bit", "fast"])
def test_not_rates(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "500", "-1s", "1h30", "nans", "1e999s", "soon"])
def test_not_durations(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_formats() -> None:
    assert [format_size(x) for x in (0, 999, 64e6, 1.5e9)] == ["0 B", "999 B", "64 MB", "1.5 GB"]
    assert {seconds: format_duration(seconds) for seconds in SHOWN} == SHOWN
    assert [format_rate(x) for x in (62.5e6, 1.25e9, 1)] == ["500 Mbit/s", "10 Gbit/s", "8 bit/s"]
