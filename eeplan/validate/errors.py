"""Signed relative errors and their summary, the same for every validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def relative_error(predicted: float, measured: float) -> float:
    """``predicted / measured - 1``: negative when the prediction is too low."""
    return predicted / measured - 1.0


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Of signed relative errors (fractions); all None without any."""

    n: int
    mean_abs: float | None
    max_abs: float | None
    mean: float | None
    """Signed: what is left when too high and too low cancel."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"n": self.n, "mean_abs": self.mean_abs, "max_abs": self.max_abs, "mean": self.mean}


def summarize(errors: Sequence[float]) -> ErrorSummary:
    """Mean and largest absolute value, and the signed mean."""
    if not errors:
        return ErrorSummary(0, None, None, None)
    sizes = [abs(error) for error in errors]
    return ErrorSummary(len(errors), sum(sizes) / len(sizes), max(sizes), sum(errors) / len(errors))
