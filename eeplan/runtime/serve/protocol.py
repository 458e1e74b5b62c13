"""Requests as OpenAI's protocol has them, with the fields that early exits add.

Fields whose neutral value is the only one supported are there to be refused by name, others are refused as
unknown: nothing that a client asks for is ignored, but what has no bearing on the answer (``user``, …).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields of the protocol that are accepted with these values only."""


class Strict(BaseModel):
    """No unknown fields, no NaN, no strings for numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class StreamOptions(Strict):
    """What a stream holds besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(Strict):
    """What both kinds of requests share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    # Of no bearing on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Refused unless neutral.
    suffix: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    # Beyond the protocol.
    early_exit_threshold: Probability | Annotated[list[Probability], Field(max_length=64)] | None = None
    """One for all exits, or one for each by depth; 1 never leaves early."""
    exit_layers: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    """Depths of the exits in use; all by default."""
    decode_mode: str | None = None
    exit_confidence: str | None = None
    recompute_limit: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    first_early_token: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    candidates: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Tokens to look at before an exit's full head; 0 for none."""
    candidate_source: str | None = None
    """``previous_exit``, or ``frequent`` if the server knows frequent tokens."""
    measure_candidates: bool = False
    """Whether the full head runs as well, and refusals of tokens that it would let go are counted."""
    exit_details: bool = False
    """Whether answers carry exit, confidence and latency of every token."""

    @model_validator(mode="after")
    def _only_neutral(self) -> Self:
        for name, values in NEUTRAL.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is not supported")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams only; set stream to true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Common):
    """Body of ``/v1/completions``."""

    prompt: Text | Annotated[list[Text] | list[TokenId] | list[list[TokenId]], Field(min_length=1)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported; it must equal n")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of the prompt are not computed; leave out echo or logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class ContentPart(Strict):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """Its parts as one text."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(Common):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self
