"""One HTTP request as sequences for the engine, and their tokens as pieces of text per choice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eeplan.runtime.decode.emission import CheckCounts, Emission
from eeplan.runtime.decode.exit_check import shortlist_facts
from eeplan.runtime.decode.frequent import check_number
from eeplan.runtime.decode.modes import DEFAULT_LIMIT
from eeplan.runtime.decode.options import LEAST_TEMPERATURE, NO_CANDIDATES, GenerateOptions, generate_options
from eeplan.runtime.decode.policy import Candidates, candidates_of
from eeplan.runtime.decode.requests import Request
from eeplan.runtime.decode.stop_text import Piece, StopText
from eeplan.runtime.serve.problems import Problem
from eeplan.runtime.serve.protocol import ChatRequest, Common, CompletionRequest
from eeplan.runtime.serve.service import Service
from eeplan.runtime.serve.settings import Limits, Served
from eeplan.runtime.stage import FINAL, exit_name

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats go on until they end."""
Finish = Literal["stop", "length"]


@dataclass(slots=True)
class Choice:
    """One sequence of a request."""

    index: int
    prompt_text: str
    request: Request
    text: StopText
    pieces: list[Piece] = field(default_factory=list)
    finish: Finish | None = None
    emitted: int = 0
    """Tokens that the engine gave, also those behind a stop string's beginning."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain of one choice."""

    choice: Choice
    pieces: list[Piece]
    is_last: bool


@dataclass(slots=True)
class Generation:
    """The choices of one HTTP request."""

    choices: list[Choice]
    prompt_tokens: int
    options: GenerateOptions
    calibrated: bool
    """Whether the certificate's promise holds for this request."""
    began_s: float = field(default_factory=time.perf_counter)
    exits: Counter[str] = field(default_factory=Counter)
    depths: int = 0
    """Sum over tokens."""
    checks: CheckCounts = field(default_factory=CheckCounts)
    """Of all tokens; nothing without candidates."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.emitted for choice in self.choices)

    def usage(self) -> dict[str, int]:
        """As OpenAI counts."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }

    def summary(self, served: Served) -> dict[str, Any]:
        """The exits and speed of the answer: what early exits add to the protocol."""
        seconds, made = time.perf_counter() - self.began_s, self.completion_tokens
        names = (*map(exit_name, served.exit_depths), FINAL)
        return {
            "decode_mode": self.options.mode,
            "early_exit_threshold": self.options.policy.threshold,
            "calibrated": self.calibrated,
            "exits": {name: self.exits[name] for name in names},
            "mean_depth": self.depths / made if made else None,
            "num_layers": served.num_layers,
            "candidates": shortlist_facts(self.options.policy.candidates, self.checks),
            "seconds": seconds,
            "tokens_per_s": made / seconds,
        }

    async def deltas(self, service: Service) -> AsyncGenerator[Delta, None]:
        """Run the sequences; their text as it becomes certain, the end of each choice marked.

        Raises:
            QueueFull, Draining, EngineGone, DecodeError: see :meth:`Service.begin`; before the first delta,
                or later when the engine or the server ends.
        """
        sequences = await service.begin([choice.request for choice in self.choices])
        try:
            # An empty delta says that the request was accepted.
            yield Delta(self.choices[0], [], is_last=False)
            unfinished = len(self.choices)
            while unfinished:
                token = await sequences.next()
                choice, event = self.choices[token.choice], token.event
                pieces: list[Piece] = []
                if event.emission is not None:
                    self._count(choice, event.emission, event.latency_s, service)
                    pieces = choice.text.push(event.emission, event.latency_s)
                choice.finish = event.finish
                if event.finish is not None:
                    pieces += choice.text.finish()
                if choice.text.stopped:
                    choice.finish = "stop"
                    service.drop(sequences, token.choice)
                choice.pieces += pieces
                if choice.finish is not None:
                    unfinished -= 1
                if pieces or choice.finish is not None:
                    yield Delta(choice, pieces, is_last=choice.finish is not None)
        finally:
            service.end(sequences)

    def _count(self, choice: Choice, emission: Emission, latency_s: float, service: Service) -> None:
        metrics = service.metrics
        (metrics.token_s if choice.emitted else metrics.first_token_s).observe(latency_s)
        metrics.tokens.labels(emission.exit).inc()
        choice.emitted += 1
        self.exits[emission.exit] += 1
        self.depths += emission.depth
        if emission.checks is not None:
            self.checks.add(emission.checks)


def of_completion(body: CompletionRequest, served: Served, limits: Limits) -> Generation:
    """The sequences of a ``/v1/completions`` body, n for each prompt.

    Raises:
        Problem: too many or too long. DecodeError, DataError: options or prompts that make no sense.
    """
    prompts = body.prompts
    _check_count(len(prompts) * (body.n or 1), limits)
    encoded = [
        (one, served.tokenizer.encode(one)) if isinstance(one, str) else (None, one) for one in prompts
    ]
    for text, ids in encoded:
        if text is None and not all(token < served.tokenizer.vocab_size for token in ids):
            raise Problem(
                400, f"prompt: token ids must be below {served.tokenizer.vocab_size}", param="prompt"
            )
    texts = [served.tokenizer.decode(ids) if text is None else text for text, ids in encoded]
    pairs = list(zip(texts, (ids for _, ids in encoded), strict=True))
    wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return _generation(body, pairs, wanted, body.logprobs or 0, body.stops, served, limits)


def of_chat(body: ChatRequest, served: Served, limits: Limits) -> Generation:
    """The sequences of a ``/v1/chat/completions`` body. Raises as :func:`of_completion`."""
    _check_count(body.n or 1, limits)
    messages = [{"role": one.role, "content": one.text} for one in body.messages]
    prompt = served.template.prompt(messages)
    ids = served.tokenizer.encode(prompt)
    room = max(1, served.seq_length - len(ids) + 1)
    wanted = body.max_completion_tokens or body.max_tokens or min(room, limits.max_tokens)
    stops = (*body.stops, *served.template.stop)
    return _generation(body, [(prompt, ids)], wanted, body.top_logprobs or 0, stops, served, limits)


def _generation(
    body: Common,
    prompts: Sequence[tuple[str, list[int]]],
    max_tokens: int,
    top_logprobs: int,
    stops: Sequence[str],
    served: Served,
    limits: Limits,
) -> Generation:
    if body.model is not None and body.model != served.name:
        raise Problem(
            404,
            f"the model {body.model!r} does not exist; this server has {served.name!r}",
            code="model_not_found",
            param="model",
        )
    if max_tokens > limits.max_tokens:
        raise Problem(
            400, f"max_tokens is {max_tokens}; this server allows {limits.max_tokens}", param="max_tokens"
        )
    for _, ids in prompts:
        if len(ids) > served.seq_length:
            raise Problem(
                400,
                f"the prompt has {len(ids)} tokens; this model takes at most {served.seq_length}",
                code="context_length_exceeded",
                param="prompt",
            )
    choices: list[Choice] = []
    seed = random.getrandbits(62) if body.seed is None else body.seed % 2**62
    end = frozenset({served.tokenizer.eod})
    for text, ids in prompts:
        for _ in range(body.n or 1):
            # Choices of one request must not be copies of each other.
            options = _options(body, served, max_tokens, top_logprobs, seed + len(choices))
            request = Request(tuple(ids), options, end)
            choices.append(Choice(len(choices), text, request, StopText(served.tokenizer, stops)))
    options = choices[0].request.options
    prompt_tokens = sum(len(ids) for _, ids in prompts)
    return Generation(choices, prompt_tokens, options, _is_calibrated(body, options, served))


def _options(body: Common, served: Served, max_tokens: int, top_logprobs: int, seed: int) -> GenerateOptions:
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    top_p = 0.0 if body.top_p is None or body.top_p == 1.0 else body.top_p
    certificate = served.certificate
    default_kind = certificate.confidence_kind if certificate else "max_probability"
    threshold: float | Sequence[float] = served.thresholds
    if body.early_exit_threshold is not None:
        threshold = body.early_exit_threshold
    elif body.exit_layers is not None and len(served.thresholds) > 1:
        raise Problem(
            400,
            "exit_layers: the calibrated thresholds are for all exits; give early_exit_threshold as well",
            param="exit_layers",
        )
    mode = served.default_mode if body.decode_mode is None else body.decode_mode
    kind = default_kind if body.exit_confidence is None else body.exit_confidence
    shortlist = _candidates(body, served, mode, kind)
    return generate_options(
        threshold=threshold,
        max_new_tokens=max_tokens,
        mode=mode,
        confidence=kind,
        exits=body.exit_layers,
        first_early_token=body.first_early_token or 0,
        temperature=temperature,
        # At temperature 0 the most likely token is taken, whatever these say.
        top_k=(body.top_k or 0) if temperature else 0,
        top_p=top_p if temperature else 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=seed,
        top_logprobs=top_logprobs,
        recompute_limit=DEFAULT_LIMIT if body.recompute_limit is None else body.recompute_limit,
        candidates=shortlist.number,
        candidate_source=shortlist.source,
        frequent_tokens=shortlist.frequent,
        measure_candidates=shortlist.measured,
    )


def _candidates(body: Common, served: Served, mode: str, kind: str) -> Candidates:
    """The request's, else the server's where the rest of the request allows them."""
    number, default = body.candidates, served.candidates
    if number is None:
        number = 0 if mode in NO_CANDIDATES or kind == "entropy" else default.number
        if number == 0 and (body.candidate_source is not None or body.measure_candidates):
            raise Problem(400, "candidates: give a number of them as well", param="candidates")
    if number == 0:
        return Candidates()
    check_number(number, served.tokenizer)
    source = default.source if body.candidate_source is None else body.candidate_source
    if source == "frequent" and not served.frequent:
        raise Problem(
            400,
            "candidate_source: this server knows no frequent tokens; start it with --frequent-from",
            param="candidate_source",
        )
    return candidates_of(number, source, served.frequent, body.measure_candidates or default.measured)


def _is_calibrated(body: Common, options: GenerateOptions, served: Served) -> bool:
    """Whether tokens leave exactly by the rule that was certified: no other exits, measure or picking."""
    certificate = served.certificate
    return (
        certificate is not None
        and options.policy.thresholds == certificate.thresholds
        and options.policy.exits is None
        and options.policy.first_early_token == 0
        and options.policy.confidence == certificate.confidence_kind
        and options.policy.candidates.number == 0
        and options.sampling.temperature == 0.0
        and options.sampling.repetition_penalty == 1.0
    )


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.max_choices:
        raise Problem(
            400, f"{count} answers are asked for; this server allows {limits.max_choices}", param="n"
        )
