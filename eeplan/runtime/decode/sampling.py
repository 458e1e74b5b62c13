"""Which token an exit emits: the most likely one, or one drawn from its distribution.

A draw turns one uniform number into a token. There is one generator per generation and, without speculation,
one number per emitted token, so a seed gives the same text in every decoding mode, in any company, and on
whatever process a token is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eeplan.errors import DecodeError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw. Temperature 0 takes the most likely token; ``top_k`` 0 and ``top_p`` 0 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    """Logits of tokens that are there already are divided by this if positive, multiplied if negative
    (CTRL, Keskar et al. 2019, 4.1)."""

    def pick(self, logits_V: Tensor, generator: torch.Generator, text: Sequence[int] = ()) -> int:
        """Token drawn from the logits of one position.

        Args:
            text: all tokens before it, for the repetition penalty.
        """
        return self.pick_at(logits_V, uniform_of(generator) if self.draws else 0.0, text)

    @property
    def draws(self) -> bool:
        """Whether chance has a part in it."""
        return self.temperature > 0.0

    def pick_at(self, logits_V: Tensor, uniform: float, text: Sequence[int] = ()) -> int:
        """As :meth:`pick`, with the uniform number given."""
        if not self.draws:
            return int(self._penalized(logits_V, text).argmax())
        return token_at(self.probabilities(logits_V, text), uniform)

    def probabilities(self, logits_V: Tensor, text: Sequence[int] = ()) -> Tensor:
        """What ``pick`` draws from, on the CPU: penalty, temperature, the k likeliest, then the nucleus.

        The nucleus is the smallest set of likeliest tokens whose probabilities reach ``top_p``. At
        temperature 0 all probability is the most likely token's.
        """
        wide = logits_V.to(device="cpu", dtype=torch.promote_types(logits_V.dtype, torch.float32))
        wide = self._penalized(wide, text)
        if self.temperature == 0.0:
            return torch.zeros_like(wide).index_fill_(0, wide.argmax(), 1.0)
        scaled = wide / self.temperature
        if 0 < self.top_k < len(scaled):
            # Keep by index, not by value: a tie at the k-th place must not let more tokens in.
            kept = scaled.topk(self.top_k).indices
            scaled = torch.full_like(scaled, float("-inf")).index_copy(0, kept, scaled[kept])
        probabilities = scaled.softmax(-1)
        if 0.0 < self.top_p < 1.0:
            ordered, indices = probabilities.sort(descending=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).index_copy(0, indices, ordered)
            probabilities = probabilities / probabilities.sum()
        return probabilities

    def _penalized(self, logits_V: Tensor, text: Sequence[int]) -> Tensor:
        if self.repetition_penalty == 1.0 or not text:
            return logits_V
        there = torch.tensor(sorted(set(text)), device=logits_V.device)
        found = logits_V[there]
        weaker = torch.where(found > 0, found / self.repetition_penalty, found * self.repetition_penalty)
        return logits_V.index_copy(0, there, weaker)


def uniform_of(generator: torch.Generator) -> float:
    """The generator's next number from [0, 1)."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def draw(probabilities_V: Tensor, generator: torch.Generator) -> int:
    """One token from a distribution on the CPU."""
    return token_at(probabilities_V, uniform_of(generator))


def token_at(probabilities_V: Tensor, uniform: float) -> int:
    """The token at which the cumulated probabilities pass ``uniform``: one with a probability above 0.

    Args:
        probabilities_V: up to a factor, on the CPU.
        uniform: from [0, 1).
    """
    cumulated_V = probabilities_V.cumsum(-1, dtype=torch.float64)
    total = cumulated_V[-1]
    token = int(torch.searchsorted(cumulated_V, uniform * total, right=True))
    if token < len(cumulated_V):
        return token
    # The product was rounded up to the total.
    return int(torch.searchsorted(cumulated_V, total))


def sampling(temperature: float, top_k: int, top_p: float, repetition_penalty: float = 1.0) -> Sampling:
    """Sampling options given by a user.

    Raises:
        DecodeError: an option is out of range, or would have no effect.
    """
    if not 0.0 <= temperature < float("inf"):
        raise DecodeError(
            f"temperature is {temperature}; expected a number from 0 (most likely token) upwards"
        )
    if top_k < 0:
        raise DecodeError(f"top_k is {top_k}; expected a number of tokens, or 0 for all")
    if not 0.0 <= top_p <= 1.0:
        raise DecodeError(f"top_p is {top_p}; expected a probability from 0 to 1, 0 for all tokens")
    if temperature == 0.0 and (top_k > 1 or top_p > 0.0):
        raise DecodeError(
            "top_k and top_p have no effect at temperature 0, which takes the most likely token; raise "
            "temperature or leave them out"
        )
    if not 0.0 < repetition_penalty < float("inf"):
        raise DecodeError(
            f"repetition penalty is {repetition_penalty}; expected a number above 0, 1 for none"
        )
    return Sampling(temperature, top_k, top_p, repetition_penalty)
