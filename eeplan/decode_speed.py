"""What is timed of decoding, and what it took; ``runtime.decode.speed`` does the timing. No torch here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Threshold = float | tuple[float, ...]
Name = Literal["full", "catch_up", "kv_recompute", "self_speculative", "pipeline", "transformers"]


@dataclass(frozen=True, slots=True)
class Contender:
    """What is timed: a mode at a threshold on so many sequences at once."""

    mode: Name
    batch: int
    threshold: Threshold = 1.0


@dataclass(slots=True)
class Timing:
    """What a contender took, round by round."""

    first_s: list[float] = field(default_factory=list)
    """From the prompts to the first token of all sequences."""
    token_s: list[float] = field(default_factory=list)
    """Seconds per token after that, all sequences together."""
    latencies_s: list[float] = field(default_factory=list)
    """Of single tokens of a sequence after its first one; tokens that come together share theirs."""
    exits: Counter[str] = field(default_factory=Counter)
    """Tokens by the exit that emitted them; none where nobody looked (``transformers``)."""


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How much faster ours is, from the seconds of both in the same rounds: the median of their ratios."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
