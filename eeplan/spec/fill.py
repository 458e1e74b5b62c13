"""Partial microbatches in the bubbles of the pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from eeplan.schema import Model
from eeplan.spec.fields import Fraction

FillMode = Literal["added", "same_count"]
"""``added``: partial microbatches on top of global_batch_size; ``same_count``: instead of full ones of it."""


class FillCounts(Model):
    """Partial microbatches per bubble region, chosen by hand."""

    warmup: Annotated[int, Field(ge=0)] = 0
    """Inserts between warm-up and steady state; insert k of K goes K+1-k stages deep."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Microbatches in the cool-down whose backward passes the last stages only."""


def _known_policy(value: object) -> object:
    if value not in ("none", "auto"):
        raise ValueError(
            f"{value!r} is no fill; expected none, auto or counts as in {{warmup: 1, cooldown: 2}}"
        )
    return value


FillPolicy = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[Literal["none", "auto"], BeforeValidator(_known_policy), Tag("[word]")]
    | Annotated[FillCounts, Tag("[counts]")],
    Discriminator(lambda value: "[counts]" if isinstance(value, dict | FillCounts) else "[word]"),
]


class FillSpec(Model):
    """Partial microbatches in the bubbles of the pipeline (paper 3.3)."""

    policy: FillPolicy = "none"
    """``auto``: as many as the limits on time and memory allow."""
    mode: FillMode = "added"
    max_time_overhead: Fraction = 0.001
    """Largest accepted slow-down of an iteration by ``auto``, against its full microbatches alone (a
    fraction). Measured op times are not exact to a nanosecond: with 0, a single one would decide whether an
    insert goes in. A thousandth is less than measuring an iteration can tell, and than an insert gains."""
