"""How the trained model will be decoded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eeplan.schema import Model
from eeplan.usage import UsagePrior

DecodeMode = Literal["full", "kv_recompute", "catch_up", "pipeline"]
"""How a model is decoded (paper 4; facts 6): without early exits, or who completes a left token's keys and
values: a later forward from the first layer on, one from where the token left, or the later stages."""


DECODE_MODES: tuple[DecodeMode, ...] = ("full", "kv_recompute", "catch_up", "pipeline")


class DecodeSpec(Model):
    """How the trained model will be decoded, one sequence at a time; plans predict its latency."""

    mode: Literal["kv_recompute", "catch_up"] = "catch_up"
    """What ``exits.objective: decode_speed_up`` makes fast; plans predict every mode."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
    """Confidence at which a token leaves early; 1 never."""
    recompute_limit: Annotated[int, Field(ge=0)] = 8
    """Most tokens that may wait for their deep keys and values before a pass through all layers."""
    prior: UsagePrior = UsagePrior()
    """How many tokens leave early, supposed until a usage file says what was measured."""
