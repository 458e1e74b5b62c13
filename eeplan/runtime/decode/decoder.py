"""Decoding one sequence with early exits: modes ``full``, ``kv_recompute`` and ``catch_up``.

Every token is the one that computing all layers at all positions would give at the first exit that is
confident enough. When as many tokens wait as the user's limit allows, the next forward goes through all
layers; that fills the store but does not change the exit at which its token is emitted. Which rows a forward
runs is decided in ``rows``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import Emission, checked_judgement
from eeplan.runtime.decode.policy import ConfidenceKind, Judgement
from eeplan.runtime.decode.rows import RowRunner
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import FINAL, exit_name


@dataclass(slots=True)
class ExitDecoder:
    """Decoder of one sequence. Feed the prompt to ``prefill``, then each token to ``step``."""

    rows: RowRunner
    thresholds: dict[int, float]
    """By the depth of every exit in use."""
    confidence: ConfidenceKind
    first_early_token: int
    sampling: Sampling
    generator: torch.Generator
    limit: int
    """Most tokens that may wait; 0 runs every token through all layers."""
    text: list[int] = field(default_factory=list)
    """Every token fed so far."""
    emitted: int = 0
    _left: tuple[ExitSpec, Tensor, Judgement] | None = None
    """Where the current token left, and its logits there."""

    def emissions(self, prompt: Sequence[int]) -> Iterator[Emission]:
        """Tokens after a prompt, one by one, until the store is full."""
        emission = self.prefill(prompt)
        yield emission
        while self.rows.length < self.rows.network.store.capacity:
            emission = self.step(emission.token)
            yield emission

    def prefill(self, prompt: Sequence[int]) -> Emission:
        """Run the prompt through all layers and emit the first token.

        Args:
            prompt: token ids, at least one, at most the store's capacity.
        """
        assert self.rows.length == 0, "a decoder serves one prompt"
        return self._extend(prompt, forced=True)

    def step(self, token: int) -> Emission:
        """Feed the token emitted last (or any other) and emit the next one."""
        return self._extend((token,), forced=len(self.rows.waiting) >= self.limit)

    @torch.no_grad()
    def _extend(self, tokens: Sequence[int], forced: bool) -> Emission:
        self.text.extend(tokens)
        self._left = None
        check = self._leaves if self.emitted >= self.first_early_token else None
        depth, hidden_RH = self.rows.run(tokens, check, forced)
        self.emitted += 1
        if self._left is not None:
            exit_, logits_V, judgement = self._left
            return self._emit(logits_V, exit_name(exit_.depth), exit_.depth, judgement)
        logits_V = self.rows.network.final_logits(hidden_RH[-1:])[0]
        return self._emit(logits_V, FINAL, depth, checked_judgement(logits_V, self.confidence, FINAL))

    def _leaves(self, exit_: ExitSpec, logits_V: Tensor) -> bool:
        judgement = checked_judgement(logits_V, self.confidence, exit_name(exit_.depth))
        if judgement.confidence < self.thresholds[exit_.depth]:
            return False
        self._left = (exit_, logits_V, judgement)
        return True

    def _emit(self, logits_V: Tensor, name: str, depth: int, judgement: Judgement) -> Emission:
        token = self.sampling.pick(logits_V, self.generator, self.text)
        logprob = float(logits_V[token]) - judgement.log_normalizer
        return Emission(token, name, depth, judgement.confidence, logprob)
