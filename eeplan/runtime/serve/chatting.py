"""A conversation in a terminal: turns, history, and commands that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from eeplan.errors import DataError, DecodeError
from eeplan.generation_view import GenerationView
from eeplan.runtime.decode.options import GenerateOptions
from eeplan.runtime.decode.requests import Engine
from eeplan.runtime.serve.continuing import continue_on
from eeplan.runtime.serve.opening import default_thresholds, thresholds_sentence
from eeplan.runtime.serve.settings import Served

HELP = "/threshold VALUE…: when tokens leave early, or 'calibrated'; /reset: forget the talk; /quit"
ROOM = 4
"""At least one in so many tokens of the context is kept for the answer."""


@dataclass(slots=True)
class Conversation:
    """Turns so far, and the engine that answers."""

    served: Served
    engine: Engine
    options: Callable[[tuple[float, ...]], GenerateOptions]
    """Options of an answer at given thresholds."""
    out: TextIO
    thresholds: tuple[float, ...]
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        """Answer line by line until they end, or until /quit."""
        self._say(f"{self.served.name}: {thresholds_sentence(self.thresholds, self.served.certificate)}")
        if self.served.template.source is None:
            self._say("no chat template in the tokenizer: turns are plain text, 'User:' and 'Assistant:'")
        self._say(HELP)
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.answer(text)

    def answer(self, text: str) -> dict[str, Any] | None:
        """Show the answer to a turn; None if it cannot be given. Ctrl-C ends it, and keeps what is there."""
        self.turns.append({"role": "user", "content": text})
        view = GenerationView("", self.out)
        shown: list[str] = []

        def show(token: dict[str, Any]) -> None:
            shown.append(token["text"])
            view.token(token)

        result = None
        try:
            ids = self._prompt()
            result = continue_on(
                self.engine, self.served, ids, self.options(self.thresholds), self.served.template.stop, show
            )
            view.finish(result)
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except (DataError, DecodeError) as error:
            self.turns.pop()
            self._say(f"error: {error}")
            return None
        self.turns.append({"role": "assistant", "content": "".join(shown).strip()})
        return result

    def _prompt(self) -> list[int]:
        """Token ids of the talk; the oldest turns are left out when it is too long."""
        room = self.served.seq_length - self.served.seq_length // ROOM
        alone = len(self._encoded(self.turns[-1:]))
        if alone > room:
            raise DecodeError(f"this has {alone} tokens, there is room for {room}; say less")
        while len(ids := self._encoded(self.turns)) > room:
            del self.turns[:2]
            self._say("(the oldest turn is forgotten, the talk is longer than the model's context)")
        return ids

    def _encoded(self, turns: list[dict[str, str]]) -> list[int]:
        return self.served.tokenizer.encode(self.served.template.prompt(turns))

    def _command(self, text: str) -> None:
        name, *values = text.split()
        if name == "/reset":
            self.turns.clear()
            self._say("(forgotten)")
        elif name == "/threshold" and values:
            try:
                thresholds = default_thresholds(values, self.served.certificate)
                self.options(thresholds)
            except DecodeError as error:
                self._say(f"error: {error}")
                return
            self.thresholds = thresholds
            self._say(thresholds_sentence(thresholds, self.served.certificate))
        else:
            self._say(HELP)

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines from the keyboard, or from whatever stdin is, until it ends or Ctrl-C."""
    while True:
        try:
            yield input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return
