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

from eeplan.runtime.decode.emission import CheckCounts, Emission
from eeplan.runtime.decode.exit_check import ExitCheck, Found, found_at
from eeplan.runtime.decode.ops import Logits, Program, Steps, alone, played
from eeplan.runtime.decode.rows import RowRunner
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import FINAL


@dataclass(slots=True)
class ExitDecoder:
    """Decoder of one sequence: a program, or the prompt to ``prefill`` and then each token to ``step``."""

    rows: RowRunner
    check: ExitCheck
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
    _left: Found | None = None
    """Where the current token left."""
    _checks: CheckCounts | None = None
    """Of the current token; None where they are counted in all only."""

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
        self._left = self.check.top_C = None
        self._checks = CheckCounts() if self.check.candidates.number else None
        check = self._leaves if self.emitted >= self.first_early_token else None
        depth, hidden_RH = yield from self.rows.forward(tokens, check, forced)
        self.emitted += 1
        found = self._left
        if found is None:
            logits_V = (yield Logits(self.rows.network, hidden_RH[-1:], depth))[0]
            found = found_at(FINAL, depth, logits_V, self.check.confidence)
        token = self.sampling.pick(found.logits_V, self.generator, self.text)
        if self._checks is not None:
            self.rows.work.exits.add(self._checks)
        return found.emission(token, self.top_logprobs, self._checks)

    def _leaves(self, exit_: ExitSpec, read_1H: Tensor) -> Steps[bool]:
        counts = self.rows.work.exits if self._checks is None else self._checks
        self._left = yield from self.check.leaves(self.rows.network, exit_, read_1H, counts)
        return self._left is not None
