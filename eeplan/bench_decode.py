"""``eeplan bench decode``: what was timed becomes runs, predictions and ratios. No torch here.

What runs is in ``runtime.benches``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eeplan.decode_speed import Contender, Name, Threshold, Timing, median_ratio
from eeplan.plan import Plan
from eeplan.profile import OpProfile
from eeplan.sim.decode_batch import Rounds, batch_ns_per_token, speculative_batch_ns_per_token
from eeplan.sim.decode_process import DecodeProcess, Exit, decode_process
from eeplan.sim.layout import Layout
from eeplan.spec import DecodeMode

PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Counts:
    """What does not depend on time: one pass over prompts, each alone."""

    exits: dict[str, int]
    """Tokens by exit, shallowest first."""
    mean_depth: float
    layers_per_token: float
    """Decoder layers really run for each token after a sequence's first."""
    checks_per_token: float
    """Early heads computed for each."""
    agreement: float
    """Share of tokens that are the full model's after the same text."""
    rounds: Rounds | None = None
    """Of ``self_speculative``."""


def run_of(
    contender: Contender, timing: Timing, counts: Counts | None, predicted_tokens_per_s: float | None
) -> dict[str, Any]:
    """One entry of ``runs``.

    Args:
        counts: None where tokens were not looked at (``transformers``).

    Returns:
        ``mode``, ``batch``, ``threshold``; ``tokens_per_s``, median over rounds, of all sequences together,
        after the first token; ``predicted_tokens_per_s`` or None; ``mean_layers``, decoder layers run per
        token; ``agreement_with_full``; ``time_to_first_token_s``; ``latency_s`` of a token in percentiles;
        ``mean_depth``, ``checks_per_token`` and ``exits``, tokens by exit.
    """
    speed = 1.0 / statistics.median(timing.token_s)
    ordered = sorted(timing.latencies_s)
    latency = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES}
    return {
        "mode": contender.mode,
        "batch": contender.batch,
        "threshold": contender.threshold,
        "tokens_per_s": speed,
        "predicted_tokens_per_s": predicted_tokens_per_s,
        "mean_layers": counts.layers_per_token if counts else None,
        "agreement_with_full": counts.agreement if counts else None,
        "time_to_first_token_s": statistics.median(timing.first_s),
        "latency_s": latency,
        "mean_depth": counts.mean_depth if counts else None,
        "checks_per_token": counts.checks_per_token if counts else None,
        "exits": counts.exits if counts else None,
    }


def ratios_of(
    timings: Mapping[Contender, Timing], threshold: Threshold, ops_s: float
) -> dict[str, float | None]:
    """Tokens/s over tokens/s at batch 1 and one threshold: medians of the ratios within rounds.

    Args:
        ops_s: what the model's ops take for one token of mode ``full``.

    Returns:
        Named as ``catch_up_vs_full``; None where one of both was not timed. ``framework_overhead``: share of
        a token's time in mode ``full`` that is outside the model's ops.
    """

    def seconds(mode: Name) -> list[float] | None:
        early = mode not in ("full", "transformers")
        found = timings.get(Contender(mode, 1, threshold if early else 1.0))
        return found.token_s if found else None

    def ratio(mode: Name, other: Name) -> float | None:
        ours, theirs = seconds(mode), seconds(other)
        if ours is None or theirs is None:
            return None
        return median_ratio(ours, theirs)

    full = seconds("full")
    return {
        "catch_up_vs_full": ratio("catch_up", "full"),
        "pipeline_vs_full": ratio("pipeline", "full"),
        "self_speculative_vs_full": ratio("self_speculative", "full"),
        "catch_up_vs_kv_recompute": ratio("catch_up", "kv_recompute"),
        "full_vs_transformers": ratio("full", "transformers"),
        "framework_overhead": 1.0 - ops_s / statistics.median(full) if full else None,
    }


@dataclass(frozen=True, slots=True)
class Predictor:
    """Tokens/s by the decode model, from a profile and what the tokens did."""

    plan: Plan
    profile: OpProfile | None
    """None predicts nothing."""
    pipeline_size: int = 2
    """Processes of mode ``pipeline``; predicted where the plan has as many stages and the profile measured
    decode steps with as many processes."""

    def tokens_per_s(self, contender: Contender, timing: Timing, counts: Counts | None) -> float | None:
        """Of all sequences together; None without a profile, and for what is not ours.

        Args:
            timing: whose tokens by exit are the usage; its times are not looked at.
            counts: with the rounds of ``self_speculative``.
        """
        mode, batch = contender.mode, contender.batch
        if self.profile is None or counts is None or mode == "transformers":
            return None
        stages = len(self.plan.stages)
        if mode == "pipeline" and not (stages == self.pipeline_size and self._was_measured(stages)):
            return None
        limit, shares = self.plan.run.decode.recompute_limit, self._shares(timing.exits)
        if mode == "self_speculative":
            process = self._process(self.profile, "catch_up")
            assert counts.rounds is not None, "rounds are counted with drafts"
            ns = speculative_batch_ns_per_token(process, process.exits[0], counts.rounds, limit, batch)
            return 1e9 / ns
        process = self._process(self.profile, mode)
        if mode == "full":
            process, shares = replace(process, exits=()), (1.0,)
        return 1e9 / batch_ns_per_token(process, mode, shares, limit, batch)

    def _process(self, profile: OpProfile, mode: DecodeMode) -> DecodeProcess:
        exits = [Exit(one.depth, one.head, one.stage) for one in self.plan.exits]
        layers = tuple(one.last_layer - one.first_layer + 1 for one in self.plan.stages)
        return decode_process(profile, Layout(layers), exits, mode)

    def _shares(self, exits: Counter[str]) -> tuple[float, ...]:
        """Of tokens by exit as they were counted, the final one last."""
        depths = sorted(one.depth for one in self.plan.exits)
        early = [exits[f"exit_{depth}"] / exits.total() for depth in depths]
        return (*early, 1.0 - sum(early))

    def _was_measured(self, processes: int) -> bool:
        """Whether decode steps were timed with so many processes at once."""
        return self.profile is not None and any(one.processes == processes for one in self.profile.decode)


def contenders(
    modes: Sequence[Name], batches: Sequence[int], thresholds: Sequence[Threshold]
) -> list[Contender]:
    """``full`` and, for each threshold, the modes with early exits, at every batch size."""
    return [
        Contender(mode, batch, threshold)
        for batch in batches
        for mode, threshold in [("full", 1.0), *((m, t) for t in thresholds for m in modes)]
    ]
