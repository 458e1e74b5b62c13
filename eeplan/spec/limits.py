"""Limits that a plan must respect."""

from __future__ import annotations

from pydantic import PositiveInt

from eeplan.schema import Model
from eeplan.spec.fields import Fraction


class LimitsSpec(Model):
    """Limits that a plan must respect; None means no limit."""

    device_memory_bytes: PositiveInt | None = None
    max_time_overhead: Fraction = 0.05
    """Largest accepted slow-down against the same model without exits (a fraction); binds ``count: auto``."""
