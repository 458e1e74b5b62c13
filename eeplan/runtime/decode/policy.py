"""When a token leaves early: confidence at an exit against a threshold (EE-LLM 4; CALM 3.5).

Greedy rule: the token leaves at the first exit whose confidence reaches its threshold. A threshold of 1 means
never (a probability that rounds to 1.0 does not leave), 0 means always. Confidence is of the model's own
distribution: at temperature 1, before any penalty, over the vocabulary without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from eeplan.errors import DecodeError
from eeplan.runtime.model import ExitSpec

ConfidenceKind = Literal["max_probability", "margin", "entropy"]
"""Largest probability; its distance to the second largest; 1 - entropy / log V. All from 0 to 1."""
CONFIDENCE_KINDS: tuple[ConfidenceKind, ...] = get_args(ConfidenceKind)


CandidateSource = Literal["previous_exit", "frequent"]
"""The likeliest tokens of the last exit whose full head was run; tokens that are frequent anyway."""
CANDIDATE_SOURCES: tuple[CandidateSource, ...] = get_args(CandidateSource)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The shortlist looked at before a full head (see ``exit_check``); made by :func:`candidates_of`."""

    number: int = 0
    """Tokens on it; 0 goes to the full head at once."""
    source: CandidateSource = "previous_exit"
    frequent: tuple[int, ...] = ()
    """The shortlist of source ``frequent``."""
    measured: bool = False
    """Whether refusals are held against the full head and counted."""


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """What early exits are held against; made by :func:`exit_policy`."""

    thresholds: tuple[float, ...]
    """One for all exits in use, or one for each by depth."""
    confidence: ConfidenceKind = "max_probability"
    exits: tuple[int, ...] | None = None
    """Depths of the exits in use; None is all."""
    first_early_token: int = 0
    """So many tokens go through all layers before the first that may leave early."""
    candidates: Candidates = Candidates()

    @property
    def threshold(self) -> float | tuple[float, ...]:
        """As the user gave it."""
        return self.thresholds[0] if len(self.thresholds) == 1 else self.thresholds

    def for_exits(self, exits: Sequence[ExitSpec]) -> tuple[tuple[ExitSpec, float], ...]:
        """The exits to check with their thresholds, by depth; those that no token can leave at left out.

        Raises:
            DecodeError: an exit that the model does not have; not as many thresholds as exits.
        """
        by_depth = {exit_.depth: exit_ for exit_ in exits}
        depths = sorted(by_depth if self.exits is None else self.exits)
        unknown = [depth for depth in depths if depth not in by_depth]
        if unknown:
            has = f"exits at depths {sorted(by_depth)}" if by_depth else "no early exit"
            raise DecodeError(f"exits: the model has no exit at depth {unknown[0]}; it has {has}")
        thresholds = self.thresholds * len(depths) if len(self.thresholds) == 1 else self.thresholds
        if len(thresholds) != len(depths):
            raise DecodeError(
                f"threshold: {len(thresholds)} values for {len(depths)} exits (depths {depths}); give one "
                "for all, or one for each"
            )
        pairs = zip(depths, thresholds, strict=True)
        return tuple((by_depth[depth], threshold) for depth, threshold in pairs if threshold < 1.0)


def exit_policy(
    threshold: float | Sequence[float],
    confidence: str = "max_probability",
    exits: Sequence[int] | None = None,
    first_early_token: int = 0,
    candidates: Candidates | None = None,
) -> ExitPolicy:
    """Policy of what a user gives.

    Args:
        threshold: one for all exits, or one for each by depth.
        confidence: one of ``CONFIDENCE_KINDS``.
        exits: depths of the exits in use; None is all.
        first_early_token: how many tokens go through all layers first.
        candidates: a shortlist to look at before a full head; None for none.

    Raises:
        DecodeError: a value is out of range.
    """
    thresholds = (threshold,) if isinstance(threshold, int | float) else tuple(threshold)
    for value in thresholds:
        if not 0.0 <= value <= 1.0:
            raise DecodeError(
                f"threshold is {value}; expected a confidence from 0 (leave at the first exit) to 1 "
                "(never leave early)"
            )
    if not thresholds:
        raise DecodeError("threshold: no value; expected one for all exits, or one for each")
    kinds = {kind: kind for kind in CONFIDENCE_KINDS}
    if confidence not in kinds:
        raise DecodeError(f"confidence is '{confidence}'; expected one of {', '.join(CONFIDENCE_KINDS)}")
    if first_early_token < 0:
        raise DecodeError(f"first early token is {first_early_token}; expected 0 or more")
    if exits is not None and len(set(exits)) != len(exits):
        raise DecodeError(f"exits are {list(exits)}; expected every depth once")
    if candidates is not None and candidates.number and confidence == "entropy":
        raise DecodeError(
            "candidates: a few tokens do not bound the entropy of all; use confidence max_probability or "
            "margin, or leave candidates out"
        )
    chosen = None if exits is None else tuple(sorted(exits))
    return ExitPolicy(thresholds, kinds[confidence], chosen, first_early_token, candidates or Candidates())


def candidates_of(
    number: int, source: str = "previous_exit", frequent: Sequence[int] = (), measured: bool = False
) -> Candidates:
    """Shortlist of what a user gives.

    Args:
        number: tokens on it; 0 for none.
        source: one of ``CANDIDATE_SOURCES``.
        frequent: tokens, most frequent first; at least ``number`` for source ``frequent``.

    Raises:
        DecodeError: a value is out of range.
    """
    if number < 0:
        raise DecodeError(f"candidates is {number}; expected a number of tokens, or 0 for none")
    sources = {name: name for name in CANDIDATE_SOURCES}
    if source not in sources:
        raise DecodeError(f"candidate source is '{source}'; expected one of {', '.join(CANDIDATE_SOURCES)}")
    if measured and number == 0:
        raise DecodeError("measure candidates: there are none; ask for a number of candidates, too")
    if source == "frequent" and len(frequent) < number:
        raise DecodeError(
            f"candidates: {number} wanted, {len(frequent)} frequent tokens known; ask for fewer"
        )
    kept = tuple(frequent[:number]) if source == "frequent" else ()
    return Candidates(number, sources[source], kept, measured)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one position's logits say before a token is picked."""

    confidence: float
    log_normalizer: float
    """log sum exp of the logits: a token's log-probability is its logit minus this."""


def judge(logits_V: Tensor, kind: ConfidenceKind = "max_probability") -> Judgement:
    """Confidence of a distribution given by its logits, computed in at least float32."""
    wide = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    highest = wide.max()
    shares = (wide - highest).exp()
    total = float(shares.sum())
    log_normalizer = float(highest) + (math.log(total) if total > 0.0 else math.nan)
    if kind == "max_probability" or len(wide) == 1:
        return Judgement(1.0 / total, log_normalizer)
    if kind == "margin":
        first, second = shares.topk(2).values.tolist()
        return Judgement((first - second) / total, log_normalizer)
    # Entropy = log sum exp - mean logit; where a share is 0, so is its part of the entropy.
    mean_logit = float((shares * wide.clamp(min=torch.finfo(wide.dtype).min)).sum()) / total
    entropy = max(0.0, log_normalizer - mean_logit)
    return Judgement(max(0.0, 1.0 - entropy / math.log(len(wide))), log_normalizer)


def confidence_of(logits_V: Tensor, kind: ConfidenceKind = "max_probability") -> float:
    """Confidence alone; see :func:`judge`."""
    return judge(logits_V, kind).confidence
