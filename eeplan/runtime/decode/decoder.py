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

from eeplan.runtime.decode.emission import Emission, checked_judgement, top_logprobs
from eeplan.runtime.decode.ops import Logits, Program, Steps, alone, played
from eeplan.runtime.decode.policy import ConfidenceKind, Judgement
from eeplan.runtime.decode.rows import RowRunner
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import FINAL, exit_name


@dataclass(slots=True)
class ExitDecoder:
    """Decoder of one sequence: a program, or the prompt to ``prefill`` and then each token to ``step``."""

    rows: RowRunner
    thresholds: dict[int, float]
    """By the depth of every exit in use."""
    confidence: ConfidenceKind
    first_early_token: int
    sampling: Sampling
    generator: torch.Generator
    limit: int
    """Most tokens that may wait; 0 runs every token through all layers."""
    top_logprobs: int = 0
    """How many likeliest tokens an emission lists."""
    text: list[int] = field(default_factory=list)
    """Every token fed so far."""
    emitted: int = 0
    _left: tuple[ExitSpec, Tensor, Judgement] | None = None
    """Where the current token left, and its logits there."""

    def program(self, prompt: Sequence[int]) -> Program:
        """Tokens after a prompt, until the store is full.

        Args:
            prompt: token ids, at least one, at most the store's capacity. It runs through all layers.
        """
        assert self.rows.length == 0, "a decoder serves one prompt"
        emission = yield from self._extend(prompt, forced=True)
        yield (emission,)
        while self.rows.length < self.rows.network.store.capacity:
            emission = yield from self._extend((emission.token,), self._is_forced())
            yield (emission,)

    def emissions(self, prompt: Sequence[int]) -> Iterator[Emission]:
        """The same on its own, token by token."""
        return played(self.program(prompt))

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Emission:
        """Run the prompt through all layers and emit the first token."""
        assert self.rows.length == 0, "a decoder serves one prompt"
        return alone(self._extend(prompt, forced=True))

    @torch.no_grad()
    def step(self, token: int) -> Emission:
        """Feed the token emitted last (or any other) and emit the next one."""
        return alone(self._extend((token,), self._is_forced()))

    def _is_forced(self) -> bool:
        return len(self.rows.waiting) >= self.limit

    def _extend(self, tokens: Sequence[int], forced: bool) -> Steps[Emission]:
        self.text.extend(tokens)
        self._left = None
        check = self._leaves if self.emitted >= self.first_early_token else None
        depth, hidden_RH = yield from self.rows.forward(tokens, check, forced)
        self.emitted += 1
        if self._left is not None:
            exit_, logits_V, judgement = self._left
            return self._emit(logits_V, exit_name(exit_.depth), exit_.depth, judgement)
        logits_V = (yield Logits(self.rows.network, hidden_RH[-1:], depth))[0]
        return self._emit(logits_V, FINAL, depth, checked_judgement(logits_V, self.confidence, FINAL))

    def _leaves(self, exit_: ExitSpec, read_1H: Tensor) -> Steps[bool]:
        logits_V = (yield Logits(self.rows.network, read_1H, exit_.depth))[0]
        self.rows.work.checks += 1
        judgement = checked_judgement(logits_V, self.confidence, exit_name(exit_.depth))
        if judgement.confidence < self.thresholds[exit_.depth]:
            return False
        self._left = (exit_, logits_V, judgement)
        return True

    def _emit(self, logits_V: Tensor, name: str, depth: int, judgement: Judgement) -> Emission:
        token = self.sampling.pick(logits_V, self.generator, self.text)
        logprob = float(logits_V[token]) - judgement.log_normalizer
        top = top_logprobs(logits_V, judgement.log_normalizer, self.top_logprobs)
        return Emission(token, name, depth, judgement.confidence, logprob, top_logprobs=top)
