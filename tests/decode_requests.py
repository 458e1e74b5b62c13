"""Requests drawn at random and engines played to their end, for the tests of decoding engines."""

from __future__ import annotations

import random
from collections.abc import Sequence

from decode_models import SEQ_LENGTH

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.modes import MODES, Mode
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.requests import Engine, Request

VOCAB = 13


def drawn_request(rng: random.Random, modes: Sequence[Mode] = MODES, max_new_tokens: int = 8) -> Request:
    """Prompts of different lengths, thresholds, limits; half of them drawn from a distribution."""
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, SEQ_LENGTH - 4)))
    draws = rng.random() < 0.5
    options = generate_options(
        threshold=round(rng.random() ** 2, 3),
        max_new_tokens=rng.randint(1, max_new_tokens),
        mode=rng.choice(modes),
        confidence=rng.choice(["max_probability", "margin", "entropy"]),
        temperature=1.3 if draws else 0.0,
        top_p=0.95 if draws and rng.random() < 0.5 else 0.0,
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randrange(1000),
        recompute_limit=rng.randint(0, 6),
        first_early_token=rng.choice([0, 0, 2]),
    )
    return Request(prompt, options, frozenset({VOCAB - 1} if rng.random() < 0.3 else ()))


def play(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> list[list[Emission]]:
    """Tokens of each request. ``arrivals``: the step before which each is submitted; else all at once."""
    due = list(arrivals) or [0] * len(requests)
    tokens: dict[int, list[Emission]] = {}
    index_of: dict[int, int] = {}
    done: set[int] = set()
    step = 0
    while len(done) < len(requests):
        for index, at in enumerate(due):
            if at == step:
                index_of[engine.submit(requests[index])] = index
                tokens[index] = []
        for event in engine.step():
            index = index_of[event.request]
            assert index not in done, "an event after the end"
            if event.emission is not None:
                tokens[index].append(event.emission)
            if event.finish is not None:
                done.add(index)
        step += 1
        assert step < 10_000, "the engine does not come to an end"
    assert engine.running == engine.waiting == 0
    return [tokens[index] for index in range(len(requests))]
