"""Numbers in words."""

from __future__ import annotations

import pytest

from eeplan.report import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.seconds(1.2345), "1.23 s"),
        (words.seconds(0.0456), "45.6 ms"),
        (words.seconds(3.2e-6), "3.20 µs"),
        (words.seconds(0.0), "0 µs"),
        (words.seconds(123.4), "123 s"),
        (words.seconds(0.98, ("s", 1.0)), "0.980 s"),
        (words.size(72 * 2**20), "72.0 MiB"),
        (words.size(3.5 * 2**30), "3.50 GiB"),
        (words.size(0, ("MiB", 2**20)), "0 MiB"),
        (words.signed_percent(-0.0161), "−1.6 %"),
        (words.signed_percent(0.5), "+50.0 %"),
        (words.signed_percent(None), "–"),
        (words.percent(0.123), "12.3 %"),
        (words.number(12345.6), "12,346"),
        (words.number(-0.00213), "−0.00213"),
        (words.number(float("nan")), "not finite"),
        (words.quantity(900.0, "tokens/s"), "900 tokens/s"),
        (words.quantity(0.9, "s", like=1.1), "0.900 s"),
        (words.listing(["a", "b", "c"]), "a, b and c"),
        (words.listing(["a"]), "a"),
        (words.plural(1, "process", "processes"), "1 process"),
        (words.plural(2, "process", "processes"), "2 processes"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert text.replace(words.THIN, " ") == expected
