"""Decoding many sequences that come and go, on one process.

Every sequence decides for itself: none leaves early or is held back because of another, and each gets the
tokens that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from eeplan.errors import DecodeError
from eeplan.runtime.decode.admission import Admission
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.lockstep import advance
from eeplan.runtime.decode.modes import Decoder, decoder_on, drafting_exit
from eeplan.runtime.decode.network import DecodeNetwork, Transformer
from eeplan.runtime.decode.ops import Program
from eeplan.runtime.decode.options import GenerateOptions
from eeplan.runtime.decode.requests import Finish, Request, TokenEvent
from eeplan.runtime.decode.weights import Weights, weights_of
from eeplan.runtime.model import EarlyExitGPT, ExitSpec


@dataclass(slots=True)
class Running:
    """One sequence that has joined."""

    request: Request
    decoder: Decoder
    program: Program
    most_tokens: int
    since_s: float
    """When its last token came, or when it was submitted."""
    emitted: int = 0


class LocalEngine:
    """Engine of one process that holds the whole model.

    A step runs one forward of every sequence in it. Keys and values are allocated when a sequence joins, for
    all the tokens it may get, and freed when it is done or cancelled; so at most ``max_running`` stores of
    the model's sequence length exist.

    Args:
        model: the whole model, without tensor parallelism; or its weights, for sequences as long as the model
            was trained on.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
        max_running: sequences that decode at once; others wait.
    """

    def __init__(
        self, model: EarlyExitGPT | Weights, *, vocab_size: int | None = None, max_running: int = 8
    ) -> None:
        if isinstance(model, EarlyExitGPT):
            model = weights_of(model, model.run.training.seq_length, vocab_size)
        self._transformer = Transformer(model)
        self._sequences: Admission[Running] = Admission(max_running)

    def submit(self, request: Request) -> int:
        """Take a sequence in; see ``requests.Engine``."""
        if request.options.mode == "pipeline":
            raise DecodeError("mode is 'pipeline'; it takes several processes, this engine has one")
        weights = self._transformer.weights
        check_request(request, weights, weights.stage.exits)
        return self._sequences.submit(request)

    def cancel(self, request: int) -> None:
        """Drop a sequence and free its keys and values; unknown and finished ones are ignored."""
        self._sequences.drop(request)

    def step(self) -> list[TokenEvent]:
        """Run one forward of every sequence; first let waiting ones join where there is room.

        A sequence that drafts may have no event in a step, or several.
        """
        self._sequences.admit(self._join)
        running = self._sequences.running
        emitted = advance(self._transformer, [one.program for one in running.values()])
        events: list[TokenEvent] = []
        for (number, sequence), emissions in zip(list(running.items()), emitted, strict=True):
            events += events_of(number, sequence, emissions)
            if events and events[-1].request == number and events[-1].finish is not None:
                del running[number]
        return events

    @property
    def running(self) -> int:
        """Sequences that hold keys and values."""
        return len(self._sequences.running)

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and have not joined."""
        return self._sequences.waiting

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are allocated now."""
        return sum(one.decoder.rows.network.store.nbytes for one in self._sequences.running.values())

    def decoder(self, request: int) -> Decoder:
        """The decoder of a sequence that is running: its keys and values, and what it has computed."""
        return self._sequences.running[request].decoder

    def close(self) -> None:
        """Drop all sequences."""
        self._sequences.clear()

    def _join(self, _: int, request: Request, since_s: float) -> Running:
        options = request.options
        capacity = capacity_of(request, self._transformer.weights.run.training.seq_length)
        decoder = decoder_on(
            DecodeNetwork.of(self._transformer, capacity),
            options.mode,
            options.policy,
            options.sampling,
            seed=options.seed,
            recompute_limit=options.recompute_limit,
            top_logprobs=options.top_logprobs,
        )
        most_tokens = capacity - len(request.prompt) + 1
        return Running(request, decoder, decoder.program(request.prompt), most_tokens, since_s)


def events_of(number: int, sequence: Running, emissions: tuple[Emission, ...]) -> list[TokenEvent]:
    """One event a token, up to the one that ends the sequence.

    Tokens that come together, after verified drafts, share the time since the last one evenly.
    """
    if not emissions:
        return []
    now_s = time.perf_counter()
    latency_s, sequence.since_s = (now_s - sequence.since_s) / len(emissions), now_s
    events: list[TokenEvent] = []
    for emission in emissions:
        sequence.emitted += 1
        if emission.token in sequence.request.end_tokens:
            return [*events, TokenEvent(number, None, "stop", latency_s)]
        finish: Finish | None = "length" if sequence.emitted == sequence.most_tokens else None
        events.append(TokenEvent(number, emission, finish, latency_s))
    return events


def check_request(request: Request, weights: Weights, exits: Sequence[ExitSpec]) -> None:
    """Refuse what the model cannot decode.

    Args:
        weights: of any stage.
        exits: of all stages.

    Raises:
        DecodeError: the prompt is empty, too long or not of the vocabulary; the model lacks an exit.
    """
    longest = weights.run.training.seq_length
    if not request.prompt:
        raise DecodeError("the prompt is empty; give at least one token to continue")
    if len(request.prompt) > longest:
        raise DecodeError(
            f"the prompt has {len(request.prompt)} tokens, the model was trained on sequences of {longest}; "
            "shorten the prompt"
        )
    unknown = [token for token in request.prompt if not 0 <= token < weights.vocab_size]
    if unknown:
        raise DecodeError(
            f"the prompt has token {unknown[0]}; expected ids from 0 to {weights.vocab_size - 1}"
        )
    check_exits(request.options, exits)


def check_exits(options: GenerateOptions, exits: Sequence[ExitSpec]) -> None:
    """Refuse options that a model with these exits has no use for.

    Raises:
        DecodeError: it lacks an exit, or thresholds do not fit in number.
    """
    options.policy.for_exits(exits)
    if options.mode == "self_speculative":
        drafting_exit(options.policy, exits)


def capacity_of(request: Request, longest: int) -> int:
    """Positions that a sequence needs, of at most ``longest``; the last token is emitted, never fed."""
    return min(longest, len(request.prompt) + request.options.max_new_tokens - 1)
