"""What exits are worth, from what every exit said about every token of a held-out text.

One forward over the text with the true tokens as input (teacher forcing) tells for every threshold at once
where each token would leave and what would be emitted there. Pure numbers: nothing here runs a model.

Shape suffixes: E exits by depth, the final one last; N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eeplan.usage import MeasuredUsage, UsagePoint

THRESHOLDS = tuple(round(1.0 - 0.05 * step, 2) for step in range(21))
"""1.0 to 0.0 in steps of 0.05."""
RELIABILITY_BINS = 15
"""Of equal width, as in Guo et al. 2017, 2."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What every exit said about every token."""

    cross_entropy_EN: NDArray[np.float64]
    """-log probability of the true token, in nats."""
    predicted_EN: NDArray[np.int64]
    """Most likely token."""
    probability_EN: NDArray[np.float64]
    """Its probability."""
    confidence_EN: NDArray[np.float64]
    """By the measure that the exit decision takes."""
    label_N: NDArray[np.int64]
    """The true token."""

    @property
    def num_tokens(self) -> int:
        """Tokens judged (N)."""
        return len(self.label_N)


def joined(parts: Sequence[Outcomes]) -> Outcomes:
    """Outcomes of several batches as one."""
    return Outcomes(
        *(
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in ("cross_entropy_EN", "predicted_EN", "probability_EN", "confidence_EN", "label_N")
        )
    )


def exit_quality(outcomes: Outcomes, exit_index: int) -> dict[str, Any]:
    """One exit on its own, as if it emitted every token.

    Returns:
        ``cross_entropy`` in nats, ``accuracy``, ``agreement_with_final`` (share of tokens with the final
        exit's most likely token), ``calibration_error`` and ``reliability``, see :func:`reliability`.
    """
    predicted_N = outcomes.predicted_EN[exit_index]
    right_N = predicted_N == outcomes.label_N
    bins = reliability(outcomes.probability_EN[exit_index], right_N)
    return {
        "cross_entropy": float(outcomes.cross_entropy_EN[exit_index].mean()),
        "accuracy": float(right_N.mean()),
        "agreement_with_final": float((predicted_N == outcomes.predicted_EN[-1]).mean()),
        "calibration_error": calibration_error(bins),
        "reliability": bins,
    }


def reliability(
    probability_N: NDArray[np.float64], right_N: NDArray[np.bool_], bins: int = RELIABILITY_BINS
) -> list[dict[str, float]]:
    """How often the most likely token is right, by the probability it was given.

    Returns:
        Bins that hold a token: ``lower`` (excluded) and ``upper`` end, ``tokens``, ``mean_probability``,
        ``accuracy``.
    """
    index_N = np.clip(np.ceil(probability_N * bins).astype(np.int64) - 1, 0, bins - 1)
    found = []
    for index in range(bins):
        inside = index_N == index
        if inside.any():
            found.append(
                {
                    "lower": index / bins,
                    "upper": (index + 1) / bins,
                    "tokens": int(inside.sum()),
                    "mean_probability": float(probability_N[inside].mean()),
                    "accuracy": float(right_N[inside].mean()),
                }
            )
    return found


def calibration_error(bins: Sequence[dict[str, float]]) -> float:
    """Expected calibration error: distance of accuracy and probability, by tokens (Guo et al. 2017, 2)."""
    total = sum(one["tokens"] for one in bins)
    return sum(one["tokens"] * abs(one["accuracy"] - one["mean_probability"]) for one in bins) / total


def leaving_exit(outcomes: Outcomes, threshold: float) -> NDArray[np.int64]:
    """[N] index of the exit at which each token leaves; a threshold of 1 lets none leave early."""
    confident_EN = _confident(outcomes, threshold)
    # The final exit takes whom no other took.
    everybody_1N = np.ones((1, outcomes.num_tokens), dtype=np.bool_)
    return np.concatenate((confident_EN, everybody_1N)).argmax(axis=0)


def threshold_quality(outcomes: Outcomes, threshold: float, depths: Sequence[int]) -> dict[str, Any]:
    """What is emitted when tokens leave at this threshold.

    Args:
        depths: layers that each exit reads, the final one last.

    Returns:
        ``threshold``; ``exit_shares``, tokens that leave at each exit, the final one last; ``mean_depth``;
        ``cross_entropy``, ``accuracy`` and ``agreement_with_final`` of what is emitted.
    """
    exit_N, tokens_N = leaving_exit(outcomes, threshold), np.arange(outcomes.num_tokens)
    predicted_N = outcomes.predicted_EN[exit_N, tokens_N]
    shares_E = np.bincount(exit_N, minlength=len(depths)) / outcomes.num_tokens
    return {
        "threshold": threshold,
        "exit_shares": shares_E.tolist(),
        "mean_depth": float(shares_E @ np.asarray(depths)),
        "cross_entropy": float(outcomes.cross_entropy_EN[exit_N, tokens_N].mean()),
        "accuracy": float((predicted_N == outcomes.label_N).mean()),
        "agreement_with_final": float((predicted_N == outcomes.predicted_EN[-1]).mean()),
    }


def measured_usage(outcomes: Outcomes, depths: Sequence[int], num_layers: int, source: str) -> MeasuredUsage:
    """The usage file's content, as `eeplan plan --usage` reads it.

    Args:
        depths: of the early exits, at least one.
        source: checkpoint and text, in words.
    """
    points = []
    for threshold in sorted(THRESHOLDS):
        first = np.bincount(leaving_exit(outcomes, threshold), minlength=len(depths) + 1)[:-1]
        could = _confident(outcomes, threshold).sum(axis=1)
        points.append(
            UsagePoint(
                threshold=threshold,
                could_leave=tuple((could / outcomes.num_tokens).tolist()),
                first_leave=tuple((first / outcomes.num_tokens).tolist()),
            )
        )
    return MeasuredUsage(
        source=source,
        num_layers=num_layers,
        depths=tuple(depths),
        num_tokens=outcomes.num_tokens,
        curve=tuple(points),
    )


def _confident(outcomes: Outcomes, threshold: float) -> NDArray[np.bool_]:
    """[early exits, N]: where confidence reaches the threshold; nowhere at threshold 1."""
    early_EN = outcomes.confidence_EN[:-1]
    return np.zeros(early_EN.shape, dtype=np.bool_) if threshold >= 1.0 else early_EN >= threshold
