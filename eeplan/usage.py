"""How often tokens could leave early: the exit-usage file (usage.yaml), measured or a named prior.

A usage says for every threshold and depth which share of the tokens is confident enough there. From it follow
the shares of tokens that leave at each exit of a plan, which the decode model and the ``usage`` loss weights
need. Measuring is the evaluation's task; a prior is a guess with a name and is marked as an assumption
wherever it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from eeplan.schema import Model, load_yaml

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Threshold = Annotated[float, Field(ge=0.0, le=1.0)]

PriorName = Literal["uniform_depth", "ramp", "none"]

ROUNDING = 1e-9
"""Shares that were divided and added up may miss their bounds by this much."""


class UsagePrior(Model):
    """A guess at the share of tokens that could leave at depth d of L, for whatever threshold is in use.

    ``uniform_depth``: d / L, the depth that a token needs is uniform over the model. ``ramp``: nobody up to
    the fraction ``start`` of the depth, then rising as a power to ``share`` at the last layer:
    share x ((d/L - start) / (1 - start)) ^ exponent. ``none``: nobody leaves early, the worst case.
    """

    name: PriorName = "uniform_depth"
    start: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    share: Share = 1.0
    exponent: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _parameters_have_an_effect(self) -> Self:
        if self.name != "ramp" and (self.start, self.share, self.exponent) != (0.0, 1.0, 1.0):
            raise ValueError(
                f"prior '{self.name}' has no parameters; take name: ramp to use start, share or exponent"
            )
        return self

    def could_leave(self, fraction: float) -> float:
        """Share of tokens that are confident enough at ``fraction`` of the depth."""
        if self.name == "none":
            return 0.0
        risen = max(0.0, (fraction - self.start) / (1.0 - self.start))
        return float(self.share * risen**self.exponent)

    def sentence(self) -> str:
        """What is assumed, in words."""
        if self.name == "none":
            return "assumed, not measured: no token is ever confident enough to leave early"
        if self.name == "uniform_depth":
            return "assumed, not measured: the depth that a token needs is uniform over the layers"
        return (
            f"assumed, not measured: no token leaves before {self.start:.0%} of the depth, from there the "
            f"share rises to {self.share:.0%} at the last layer with exponent {self.exponent:g}"
        )


class UsagePoint(Model):
    """What was counted at one threshold; tuples have one entry per measured depth."""

    threshold: Threshold
    could_leave: tuple[Share, ...]
    """Share of all tokens whose confidence at this depth reaches the threshold, other exits left aside."""
    first_leave: tuple[Share, ...]
    """Share of all tokens for which this depth is the first to reach it; what is missing to 1 is final."""


class MeasuredUsage(Model):
    """Confidence of tokens at the exits of a trained model."""

    source: str
    """Where it comes from: checkpoint and text, in words."""
    num_layers: PositiveInt
    depths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Layers computed before each exit, ascending."""
    num_tokens: PositiveInt
    curve: Annotated[tuple[UsagePoint, ...], Field(min_length=1)]
    """By ascending threshold."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"depths are {list(self.depths)}; expected ascending, each once")
        if self.depths[-1] >= self.num_layers:
            raise ValueError(
                f"depths end with {self.depths[-1]}, but the model has {self.num_layers} layers; list early "
                "exits only"
            )
        for index, point in enumerate(self.curve):
            self._check_point(point, f"curve[{index}]")
        for index, (lower, upper) in enumerate(pairwise(self.curve)):
            if upper.threshold <= lower.threshold:
                raise ValueError(f"curve[{index + 1}]: threshold {upper.threshold} does not ascend")
            if any(b > a + ROUNDING for a, b in zip(lower.could_leave, upper.could_leave, strict=True)):
                raise ValueError(
                    f"curve[{index + 1}]: more tokens could leave at threshold {upper.threshold} than at the "
                    f"lower {lower.threshold}; confidence that reaches a threshold reaches every lower one"
                )
        return self

    def _check_point(self, point: UsagePoint, where: str) -> None:
        for name in ("could_leave", "first_leave"):
            found = len(getattr(point, name))
            if found != len(self.depths):
                raise ValueError(f"{where}: {name} has {found} entries for {len(self.depths)} depths")
        if sum(point.first_leave) > 1.0 + ROUNDING:
            raise ValueError(f"{where}: first_leave adds up to {sum(point.first_leave)}, more than 1")
        for depth, first, could in zip(self.depths, point.first_leave, point.could_leave, strict=True):
            if first > could + ROUNDING:
                raise ValueError(
                    f"{where}: at depth {depth} more tokens leave first ({first}) than could leave ({could})"
                )


class ExitUsage(Model):
    """The whole usage file: a measurement or a prior."""

    schema_version: Literal[1]
    measured: MeasuredUsage | None = None
    prior: UsagePrior | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.measured is None) == (self.prior is None):
            raise ValueError("give either measured or prior")
        return self

    @property
    def content(self) -> Usage:
        """The measurement or the prior."""
        found = self.measured or self.prior
        assert found is not None, "validated to hold one of both"
        return found


Usage = MeasuredUsage | UsagePrior


@dataclass(frozen=True, slots=True)
class ExitShares:
    """Shares of tokens that leave at each of some exits, by depth, at one threshold."""

    depths: tuple[int, ...]
    num_layers: int
    early: tuple[float, ...]
    """One share per exit; the rest of the tokens reaches the final exit."""
    threshold: float
    """At 1 no token leaves early, so that no exit need be checked."""
    is_assumption: bool
    """Whether any of it was guessed rather than counted for exactly these exits and this threshold."""
    sentence: str
    """Where the shares come from, in words."""

    @property
    def final(self) -> float:
        """Share of tokens that compute all layers."""
        return max(0.0, 1.0 - sum(self.early))

    @property
    def all(self) -> tuple[float, ...]:
        """Every exit's share, the final one last."""
        return (*self.early, self.final)

    @property
    def mean_depth(self) -> float:
        """Layers that the emitting exits read, on average."""
        pairs = zip((*self.depths, self.num_layers), self.all, strict=True)
        return sum(depth * share for depth, share in pairs)


def exit_shares(usage: Usage, threshold: float, depths: Sequence[int], num_layers: int) -> ExitShares:
    """Which share of the tokens leaves at each of the exits at ``depths``.

    Counted for exactly these depths, the measured shares are taken as they are, or between two thresholds.
    Otherwise the shares are differences of :func:`leave_curve`, which supposes that a token confident at one
    depth stays confident deeper. Whatever was not counted is marked as an assumption.

    Args:
        depths: layers computed before each exit, ascending.
        num_layers: of the model that will be decoded; a measurement on another number of layers is read at
            equal fractions of the depth, and marked.
    """
    if isinstance(usage, MeasuredUsage) and (tuple(depths), num_layers) == (usage.depths, usage.num_layers):
        everybody_first = [1.0, *[0.0] * (len(depths) - 1)]
        counted = {point.threshold: point.first_leave for point in usage.curve}
        early = _within_one(_between_thresholds(counted, threshold, everybody_first))
    else:
        curve = leave_curve(usage, threshold, num_layers)
        early = tuple(float(curve[deep] - curve[shallow]) for shallow, deep in pairwise((0, *depths)))
    if not depths or threshold in (0.0, 1.0):
        guessed, sentence = False, _certain_sentence(threshold, depths)
    else:
        guessed, sentence = _guesses(usage, threshold, depths, num_layers)
    return ExitShares(
        depths=tuple(depths),
        num_layers=num_layers,
        early=early,
        threshold=threshold,
        is_assumption=guessed,
        sentence=sentence,
    )


def leave_curve(usage: Usage, threshold: float, num_layers: int) -> tuple[float, ...]:
    """Share of tokens that could leave at depth d or before, for d = 0 .. num_layers - 1; never decreasing.

    Between measured depths and thresholds the curve is linear; it starts at 0 at depth 0 and stays level
    beyond the deepest measured exit. Threshold 1 lets nobody leave and threshold 0 everybody at any exit
    (``decode.policy``), whatever was measured.
    """
    if threshold >= 1.0:
        return (0.0,) * num_layers
    if threshold <= 0.0:
        return (0.0, *(1.0,) * (num_layers - 1))
    fractions = np.arange(num_layers) / num_layers
    if isinstance(usage, UsagePrior):
        return tuple(usage.could_leave(float(fraction)) for fraction in fractions)
    known = np.array([0.0, *(depth / usage.num_layers for depth in usage.depths)])
    counted = {point.threshold: point.could_leave for point in usage.curve}
    could = np.maximum.accumulate([0.0, *_between_thresholds(counted, threshold, [1.0] * len(usage.depths))])
    return tuple(np.interp(fractions, known, could).tolist())


def load_usage(path: Path) -> tuple[ExitUsage, str]:
    """Read a usage file.

    Returns:
        The usage and the SHA-256 of the file.

    Raises:
        FileError, SchemaError.
    """
    return load_yaml(path, ExitUsage, "usage file")


def _between_thresholds(
    counted: Mapping[float, Sequence[float]], threshold: float, at_zero: Sequence[float]
) -> list[float]:
    """Shares by depth at one threshold, linear between the counted ones and the certain ends 0 and 1."""
    # The policy is certain at both ends, whatever was counted there.
    points = {**counted, 0.0: at_zero, 1.0: [0.0] * len(at_zero)}
    thresholds = sorted(points)
    return [
        float(np.interp(threshold, thresholds, [points[known][index] for known in thresholds]))
        for index in range(len(at_zero))
    ]


def _within_one(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares whose rounding does not add up to more than 1."""
    excess = max(1.0, sum(shares))
    return tuple(share / excess for share in shares)


def _certain_sentence(threshold: float, depths: Sequence[int]) -> str:
    if not depths:
        return "there is no early exit"
    never = "threshold 1 lets no token leave early"
    return never if threshold == 1.0 else "threshold 0 lets every token leave at the first exit"


def _guesses(usage: Usage, threshold: float, depths: Sequence[int], num_layers: int) -> tuple[bool, str]:
    """Whether the shares are an assumption in part, and where they come from."""
    if isinstance(usage, UsagePrior):
        return True, usage.sentence()
    guesses = []
    if num_layers != usage.num_layers:
        guesses.append(f"read at equal fractions of {usage.num_layers} layers")
    if tuple(depths) != usage.depths:
        guesses.append("for other exits than those measured, supposing that confidence lasts")
    if threshold not in {point.threshold for point in usage.curve}:
        guesses.append(f"threshold {threshold:g} interpolated")
    sentence = f"measured on {usage.num_tokens} tokens: {usage.source}"
    return bool(guesses), f"{sentence}; partly assumed: {', '.join(guesses)}" if guesses else sentence
