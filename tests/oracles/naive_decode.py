"""The oracle of every decoding mode: compute all layers and all exits at all positions, for every token anew.

The token is emitted at the first exit whose largest probability reaches the threshold, else at the final
one; a threshold of 1 or more never leaves early. No cache, no batching, no early stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from oracles import reference_gpt as gpt
from torch import Tensor

from eeplan.plan import PlannedExit
from eeplan.spec import RunSpec


@dataclass(frozen=True)
class NaiveToken:
    """One token as the oracle emits it."""

    token: int
    exit: str
    confidence: float


def greedy(logits_V: Tensor) -> int:
    """The most likely token."""
    return int(logits_V.argmax())


def decode(
    params: gpt.Parameters,
    run: RunSpec,
    exits: Sequence[PlannedExit],
    prompt: Sequence[int],
    threshold: float,
    max_new_tokens: int,
    pick: Callable[[Tensor], int] = greedy,
) -> list[NaiveToken]:
    """Generate tokens after ``prompt``; ``pick`` chooses from the logits of the emitting exit."""
    text, result = list(prompt), []
    for _ in range(max_new_tokens):
        with torch.no_grad():
            every = gpt.logits(params, run, exits, torch.tensor([text]))
        last = {name: value[0, -1, : run.model.vocab_size] for name, value in every.items()}
        confidences = {name: float(value.softmax(-1).max()) for name, value in last.items()}
        confident = [name for name in last if threshold < 1 and confidences[name] >= threshold]
        name = (confident or ["final"])[0]
        result.append(NaiveToken(pick(last[name]), name, confidences[name]))
        text.append(result[-1].token)
    return result
