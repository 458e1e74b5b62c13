from __future__ import annotations

import pytest

from eeplan.sim.explain import format_bytes, format_ns, format_percent


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5 * 2**29, "2.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
    ],
)
def test_bytes_in_human_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ms"), (1_234_567, "1.235 ms"), (10**9, "1 s"), (12_345_678_901, "12.35 s")],
)
def test_times_in_seconds_or_milliseconds(nanoseconds: int, text: str) -> None:
    assert format_ns(nanoseconds) == text


def test_percentages_are_signed() -> None:
    assert format_percent(0.0123) == "+1.23 %"
    assert format_percent(-0.5) == "-50.00 %"
