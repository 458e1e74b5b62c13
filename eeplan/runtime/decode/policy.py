"""When a token leaves early: confidence at an exit against a threshold (EE-LLM 4, CALM's softmax response).

Greedy rule: the token leaves at the first exit whose largest probability reaches the threshold. A threshold
of 1 means never (a probability that rounds to 1.0 does not leave), 0 means always at the first exit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eeplan.errors import DecodeError


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """The threshold that every early exit is held against."""

    threshold: float

    @property
    def never_leaves(self) -> bool:
        """Whether every token goes through all layers, so that no early head need run."""
        return self.threshold >= 1.0

    def leaves(self, confidence: float) -> bool:
        """Whether a token with this confidence at an early exit is emitted there."""
        return not self.never_leaves and confidence >= self.threshold


def exit_policy(threshold: float) -> ExitPolicy:
    """Policy of a threshold given by a user.

    Raises:
        DecodeError: it is no number from 0 to 1.
    """
    if not 0.0 <= threshold <= 1.0:
        raise DecodeError(
            f"threshold is {threshold}; expected a probability from 0 (leave at the first exit) to 1 "
            "(never leave early)"
        )
    return ExitPolicy(threshold)


def confidence_of(logits_V: Tensor) -> float:
    """Largest softmax probability at temperature 1, computed in at least float32."""
    wide = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    return float(1.0 / (wide - wide.max()).exp().sum())
