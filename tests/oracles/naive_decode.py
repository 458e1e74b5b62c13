"""The oracle of every decoding mode: compute all layers and all exits at all positions, for every token anew.

The token is emitted at the first exit whose confidence reaches its threshold, else at the final one; a
threshold of 1 or more never leaves early. No cache, no batching, no early stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    logprob: float
    """By the emitting exit's distribution."""


def max_probability(logits_V: Tensor) -> float:
    """The largest probability."""
    return float(logits_V.softmax(-1).max())


def margin(logits_V: Tensor) -> float:
    """Distance between the two largest probabilities; one token alone has no rival."""
    first, *rest = logits_V.softmax(-1).sort(descending=True).values[:2]
    return float(first - sum(rest))


def entropy(logits_V: Tensor) -> float:
    """1 for a certain token, 0 for a uniform distribution."""
    return 1.0 - float(torch.distributions.Categorical(logits=logits_V).entropy()) / math.log(len(logits_V))


MEASURES = {"max_probability": max_probability, "margin": margin, "entropy": entropy}


def greedy(logits_V: Tensor) -> int:
    """The most likely token."""
    return int(logits_V.argmax())


def decode(
    params: gpt.Parameters,
    run: RunSpec,
    exits: Sequence[PlannedExit],
    prompt: Sequence[int],
    threshold: float | Mapping[str, float],
    max_new_tokens: int,
    pick: Callable[[Tensor], int] = greedy,
    measure: str = "max_probability",
    first_early_token: int = 0,
    candidates: int = 0,
) -> list[NaiveToken]:
    """Generate tokens after ``prompt``.

    Args:
        threshold: of every early exit, or by name; exits without one are not used.
        pick: chooses from the logits of the emitting exit.
        candidates: before an exit's full head, look at so many likeliest tokens of the last exit whose full
            head was looked at; a token that is not confident among them stays. 0 looks at the full head.
    """
    text, result = list(prompt), []
    for index in range(max_new_tokens):
        with torch.no_grad():
            every = gpt.logits(params, run, exits, torch.tensor([text]))
        last = {name: value[0, -1, : run.model.vocab_size] for name, value in every.items()}
        confidences = {name: MEASURES[measure](value) for name, value in last.items()}
        due = {
            name: threshold.get(name, 1.0) if isinstance(threshold, Mapping) else threshold for name in last
        }
        confident = [name for name in last if due[name] < 1 and confidences[name] >= due[name]]
        if candidates:
            held_back = refused(last, confidences, due, MEASURES[measure], candidates)
            confident = [name for name in confident if name not in held_back]
        early = [name for name in confident if name != "final" and index >= first_early_token]
        name = (early or ["final"])[0]
        token = pick(last[name])
        logprob = float(last[name].log_softmax(-1)[token])
        result.append(NaiveToken(token, name, confidences[name], logprob))
        text.append(result[-1].token)
    return result


def refused(
    last: Mapping[str, Tensor],
    confidences: Mapping[str, float],
    due: Mapping[str, float],
    measure: Callable[[Tensor], float],
    candidates: int,
) -> set[str]:
    """Exits at which a token stays because of the candidates, up to the first where it leaves."""
    found, shortlist = set(), None
    for name, logits_V in last.items():
        if name == "final" or due[name] >= 1:
            continue
        if shortlist is not None and measure(logits_V[shortlist]) < due[name]:
            found.add(name)
            continue
        shortlist = logits_V.topk(min(candidates, len(logits_V))).indices
        if confidences[name] >= due[name]:
            break
    return found
