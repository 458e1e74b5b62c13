"""Answers and chunks of streams, as OpenAI's protocol has them, and what early exits add under ``eeplan``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from eeplan.runtime.decode.stop_text import Piece
from eeplan.runtime.serve.generation import Choice, Delta, Generation
from eeplan.runtime.serve.protocol import ChatRequest, Common, CompletionRequest
from eeplan.runtime.serve.settings import Served
from eeplan.runtime.tokenizer import Tokenizer


class Form(Protocol):
    """How one of the two endpoints words its answers."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer, when all choices are done."""
        ...

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        ...

    def chunk(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        """What became certain of one choice."""
        ...

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The last chunk of a stream, if the client asked for it."""
        ...


class _Envelope:
    """What all chunks of one answer share."""

    def __init__(self, body: Common, served: Served, prefix: str, kind: str) -> None:
        self.body, self.served, self.kind = body, served, kind
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}
        return head | {"choices": choices} | more

    def details(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Exit, confidence and latency of tokens, if the client asked for it."""
        if not self.body.exit_details:
            return {}
        return {"eeplan": {"tokens": [_details(piece) for piece in pieces]}}

    def ended(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        """The summary goes with the last chunk of the last choice."""
        last = delta.is_last and all(choice.finish is not None for choice in generation.choices)
        return {"eeplan": generation.summary(self.served)} if last else {}

    def whole_end(self, generation: Generation) -> dict[str, Any]:
        return {"usage": generation.usage(), "eeplan": generation.summary(self.served)}


class CompletionForm:
    """Answers of ``/v1/completions``."""

    def __init__(self, body: CompletionRequest, served: Served) -> None:
        self._body, self._served = body, served
        self._envelope = _Envelope(body, served, "cmpl", "text_completion")
        self._offsets: dict[int, int] = {}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """See :class:`Form`."""
        choices = [
            self._choice(choice, choice.pieces, self._echo(choice), choice.finish)
            for choice in generation.choices
        ]
        return self._envelope.wrap("text_completion", choices, **self._envelope.whole_end(generation))

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """See :class:`Form`: the prompts, if they are echoed."""
        if not self._body.echo:
            return []
        choices = [self._choice(choice, [], choice.prompt_text, None) for choice in generation.choices]
        return [self._envelope.wrap("text_completion", [choice]) for choice in choices]

    def chunk(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        """See :class:`Form`."""
        finish = delta.choice.finish if delta.is_last else None
        choice = self._choice(delta.choice, delta.pieces, "", finish)
        return self._envelope.wrap("text_completion", [choice], **self._envelope.ended(generation, delta))

    def usage(self, generation: Generation) -> dict[str, Any]:
        """See :class:`Form`."""
        return self._envelope.wrap("text_completion", [], **self._envelope.whole_end(generation))

    def _echo(self, choice: Choice) -> str:
        return choice.prompt_text if self._body.echo else ""

    def _choice(
        self, choice: Choice, pieces: Sequence[Piece], before: str, finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": before + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(choice, pieces),
            "finish_reason": finish,
        } | self._envelope.details(pieces)

    def _logprobs(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokenizer, offset = self._served.tokenizer, self._offsets.get(choice.index, 0)
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.text)
        self._offsets[choice.index] = offset
        return {
            "tokens": [token_name(tokenizer, piece.emission.token) for piece in pieces],
            "token_logprobs": [piece.emission.logprob for piece in pieces],
            "top_logprobs": [
                {token_name(tokenizer, token): logprob for token, logprob in piece.emission.top_logprobs}
                for piece in pieces
            ],
            "text_offset": offsets,
        }


class ChatForm:
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, body: ChatRequest, served: Served) -> None:
        self._body, self._served = body, served
        self._envelope = _Envelope(body, served, "chatcmpl", "chat.completion")

    def whole(self, generation: Generation) -> dict[str, Any]:
        """See :class:`Form`."""
        choices = []
        for choice in generation.choices:
            text = "".join(piece.text for piece in choice.pieces)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(self._choice(choice, "message", message, choice.pieces, choice.finish))
        return self._envelope.wrap("chat.completion", choices, **self._envelope.whole_end(generation))

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """See :class:`Form`: who speaks."""
        role = {"role": "assistant", "content": "", "refusal": None}
        choices = [self._choice(choice, "delta", role, [], None) for choice in generation.choices]
        return [self._envelope.wrap("chat.completion.chunk", [choice]) for choice in choices]

    def chunk(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        """See :class:`Form`."""
        text = "".join(piece.text for piece in delta.pieces)
        finish = delta.choice.finish if delta.is_last else None
        content = {"content": text} if delta.pieces else {}
        choice = self._choice(delta.choice, "delta", content, delta.pieces, finish)
        more = self._envelope.ended(generation, delta)
        return self._envelope.wrap("chat.completion.chunk", [choice], **more)

    def usage(self, generation: Generation) -> dict[str, Any]:
        """See :class:`Form`."""
        return self._envelope.wrap("chat.completion.chunk", [], **self._envelope.whole_end(generation))

    def _choice(
        self, choice: Choice, key: str, content: dict[str, Any], pieces: Sequence[Piece], finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            key: content,
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish,
        } | self._envelope.details(pieces)

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for piece in pieces:
            top = [self._token(token, logprob) for token, logprob in piece.emission.top_logprobs]
            own = self._token(piece.emission.token, piece.emission.logprob)
            content.append(own | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._served.tokenizer.token_bytes([token])[0]
        return {
            "token": token_name(self._served.tokenizer, token),
            "logprob": logprob,
            "bytes": list(raw),
        }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token; bytes that are no text in hexadecimal after ``bytes:``, as OpenAI writes them."""
    if token == tokenizer.eod:
        return "<|endoftext|>"
    raw = tokenizer.token_bytes([token])[0]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _details(piece: Piece) -> dict[str, Any]:
    emission = piece.emission
    return {
        "text": piece.text,
        "id": emission.token,
        "exit": emission.exit,
        "depth": emission.depth,
        "confidence": emission.confidence,
        "logprob": emission.logprob,
        "latency_s": piece.latency_s,
        "was_draft": emission.was_draft,
    }
