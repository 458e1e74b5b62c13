"""Decoding many sequences that come and go, on one process.

Every sequence decides for itself: none leaves early or is held back because of another, and each gets the
tokens that it gets alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from eeplan.errors import DecodeError
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.modes import make_decoder
from eeplan.runtime.decode.requests import Finish, Request, TokenEvent
from eeplan.runtime.model import EarlyExitGPT


@dataclass(slots=True)
class _Sequence:
    """One sequence and its decoder; the decoder is made when the sequence joins."""

    request: Request
    since_s: float
    emissions: Iterator[Emission] | None = None
    emitted: int = 0


class LocalEngine:
    """Engine of one process that holds the whole model.

    Args:
        model: the whole model, without tensor parallelism.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
        max_running: sequences that decode at once; others wait.
    """

    def __init__(self, model: EarlyExitGPT, *, vocab_size: int | None = None, max_running: int = 8) -> None:
        self._model = model
        self._vocab_size = model.run.model.vocab_size if vocab_size is None else vocab_size
        self._max_running = max_running
        self._next = 0
        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._running: dict[int, _Sequence] = {}

    def submit(self, request: Request) -> int:
        """Take a sequence in; see ``requests.Engine``."""
        check_request(request, self._model, self._vocab_size)
        number = self._next
        self._next += 1
        self._waiting[number] = _Sequence(request, time.perf_counter())
        return number

    def cancel(self, request: int) -> None:
        """Drop a sequence and free its keys and values; unknown and finished ones are ignored."""
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def step(self) -> list[TokenEvent]:
        """Emit the next token of every sequence in it; let waiting ones join where there is room."""
        while self._waiting and len(self._running) < self._max_running:
            number, sequence = self._waiting.popitem(last=False)
            sequence.emissions = self._decode(sequence.request)
            self._running[number] = sequence
        events = [self._advance(number, sequence) for number, sequence in self._running.items()]
        for event in events:
            if event.finish is not None:
                del self._running[event.request]
        return events

    @property
    def running(self) -> int:
        """Sequences that hold keys and values."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and have not joined."""
        return len(self._waiting)

    def close(self) -> None:
        """Drop all sequences."""
        self._waiting.clear()
        self._running.clear()

    def _decode(self, request: Request) -> Iterator[Emission]:
        options = request.options
        decoder = make_decoder(
            self._model,
            options.mode,
            options.policy,
            options.sampling,
            seed=options.seed,
            recompute_limit=options.recompute_limit,
            capacity=_capacity(request, self._model),
            vocab_size=self._vocab_size,
        )
        return decoder.emissions(request.prompt)

    def _advance(self, number: int, sequence: _Sequence) -> TokenEvent:
        assert sequence.emissions is not None, "a running sequence has a decoder"
        emission = next(sequence.emissions)
        sequence.emitted += 1
        now_s = time.perf_counter()
        latency_s, sequence.since_s = now_s - sequence.since_s, now_s
        if emission.token in sequence.request.end_tokens:
            return TokenEvent(number, None, "stop", latency_s)
        most = _capacity(sequence.request, self._model) - len(sequence.request.prompt) + 1
        finish: Finish | None = "length" if sequence.emitted == most else None
        return TokenEvent(number, emission, finish, latency_s)


def check_request(request: Request, model: EarlyExitGPT, vocab_size: int) -> None:
    """Refuse what the model cannot decode.

    Raises:
        DecodeError: the prompt is empty, too long or not of the vocabulary; the model lacks an exit.
    """
    longest = model.run.training.seq_length
    if not request.prompt:
        raise DecodeError("the prompt is empty; give at least one token to continue")
    if len(request.prompt) > longest:
        raise DecodeError(
            f"the prompt has {len(request.prompt)} tokens, the model was trained on sequences of {longest}; "
            "shorten the prompt"
        )
    unknown = [token for token in request.prompt if not 0 <= token < vocab_size]
    if unknown:
        raise DecodeError(f"the prompt has token {unknown[0]}; expected ids from 0 to {vocab_size - 1}")
    request.options.policy.for_exits(model.stage_spec.exits)


def _capacity(request: Request, model: EarlyExitGPT) -> int:
    """Positions that a sequence needs; the last token is emitted, never fed."""
    wanted = len(request.prompt) + request.options.max_new_tokens - 1
    return min(model.run.training.seq_length, wanted)
