"""Whether a token leaves at an exit: its head's confidence, after a cheap look at a few candidates if wanted.

**Candidates.** The full head of a large vocabulary costs as much as several layers. Before it, the logits
of a shortlist are computed: the likeliest tokens of the previous exit, or tokens that are frequent anyway. If
the likeliest token of all is among them, their confidence is an upper bound of the full one (leaving tokens
out only makes the denominator of a softmax smaller, and the second best no better), so a shortlist below the
threshold shows that the token stays, and the full head is not run. If it is not among them, a token that
would have left may be held back; it never leaves wrongly, since that takes the full head. ``measured`` runs
the full head as well and counts such cases, without changing any decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import CheckCounts, Emission, checked_judgement, top_logprobs
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.ops import Logits, Steps
from eeplan.runtime.decode.policy import Candidates, ConfidenceKind, Judgement, judge
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import exit_name


@dataclass(frozen=True, slots=True)
class Found:
    """A head's logits, and what they say."""

    exit: str
    depth: int
    logits_V: Tensor
    judgement: Judgement

    def emission(self, token: int, num_top_logprobs: int, checks: CheckCounts | None = None) -> Emission:
        """The emission of a token that this head decided on."""
        normalizer = self.judgement.log_normalizer
        return Emission(
            token=token,
            exit=self.exit,
            depth=self.depth,
            confidence=self.judgement.confidence,
            logprob=float(self.logits_V[token]) - normalizer,
            top_logprobs=top_logprobs(self.logits_V, normalizer, num_top_logprobs),
            checks=checks,
        )


def found_at(exit: str, depth: int, logits_V: Tensor, kind: ConfidenceKind) -> Found:
    """Judge a head's logits.

    Raises:
        DecodeError: they are not finite.
    """
    return Found(exit, depth, logits_V, checked_judgement(logits_V, kind, exit))


@dataclass(slots=True)
class ExitCheck:
    """The checks of one sequence. ``top_C`` is of the current token; clear it before the next one."""

    thresholds: dict[int, float]
    """By the depth of every exit in use."""
    confidence: ConfidenceKind
    candidates: Candidates
    top_C: Tensor | None = None
    """The likeliest tokens at the last exit whose full head was run."""
    _frequent_C: Tensor | None = None

    def leaves(
        self, network: DecodeNetwork, exit_: ExitSpec, read_1H: Tensor, counts: CheckCounts
    ) -> Steps[Found | None]:
        """What the exit found if the token leaves there."""
        threshold = self.thresholds[exit_.depth]
        shortlist_C = self._shortlist(network)
        is_refused = False
        if shortlist_C is not None:
            logits_C = (yield Logits(network, read_1H, exit_.depth, shortlist_C))[0]
            is_refused = not judge(logits_C, self.confidence).confidence >= threshold
            counts.candidates += 1
            counts.refused += is_refused
            if is_refused and not self.candidates.measured:
                return None
        logits_V = (yield Logits(network, read_1H, exit_.depth))[0]
        found = found_at(exit_name(exit_.depth), exit_.depth, logits_V, self.confidence)
        counts.full += 1
        is_confident = found.judgement.confidence >= threshold
        if is_refused:
            counts.measured += 1
            counts.wrong += is_confident
            return None
        if self.candidates.source == "previous_exit" and self.candidates.number:
            number = min(self.candidates.number, len(logits_V))
            self.top_C = logits_V.topk(number).indices
        return found if is_confident else None

    def _shortlist(self, network: DecodeNetwork) -> Tensor | None:
        if self.candidates.number == 0:
            return None
        if self.candidates.source == "previous_exit":
            return self.top_C
        if self._frequent_C is None:
            self._frequent_C = torch.tensor(self.candidates.frequent, device=network.device)
        return self._frequent_C


def shortlist_facts(candidates: Candidates, counts: CheckCounts) -> dict[str, Any] | None:
    """What a shortlist saved and, where it was measured, cost; None where there was none.

    Returns:
        Plain data. ``number``, ``source``; ``shortlists`` looked at; ``refused``, the checks that ended with
        one; ``full_heads``, heads computed for all tokens, to measure or not; ``wrong``, refusals of tokens
        that the full head would have let go, and ``wrong_share`` of the refusals: None where they were not
        measured.
    """
    if candidates.number == 0:
        return None
    known = candidates.measured
    return {
        "number": candidates.number,
        "source": candidates.source,
        "shortlists": counts.candidates,
        "refused": counts.refused,
        "full_heads": counts.full,
        "wrong": counts.wrong if known else None,
        "wrong_share": counts.wrong / max(counts.refused, 1) if known else None,
    }
