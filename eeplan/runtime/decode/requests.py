"""What a caller hands to a decoding engine, and what it gets back, step by step.

An engine decodes many sequences at once; they join and leave between steps. Whatever runs beside it, a
sequence gets the tokens that it gets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.options import GenerateOptions

Finish = Literal["stop", "length"]
"""``stop``: an end token, which is not emitted; ``length``: max_new_tokens or the model's sequence length."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    options: GenerateOptions
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the sequence."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step did for one sequence."""

    request: int
    """As :meth:`Engine.submit` returned it."""
    emission: Emission | None
    """The token; None where the sequence ended without one."""
    finish: Finish | None
    """Why the sequence is done; None while it goes on."""
    latency_s: float
    """Since the sequence's last token, or since it was submitted."""


class Engine(Protocol):
    """Decodes sequences that come and go. Not thread-safe: one thread calls it."""

    def submit(self, request: Request) -> int:
        """Take a sequence in; it joins at the next step that has room.

        Raises:
            DecodeError: the prompt is empty or too long, or the options do not fit the model.
        """
        ...

    def cancel(self, request: int) -> None:
        """Drop a sequence and free its keys and values; unknown and finished ones are ignored."""
        ...

    def step(self) -> list[TokenEvent]:
        """Run one step for the sequences in it; none when it is idle.

        Raises:
            DecodeError: the model's numbers are not finite, or a process of the engine died.
        """
        ...

    @property
    def running(self) -> int:
        """Sequences that hold keys and values."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and have not joined."""
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...
