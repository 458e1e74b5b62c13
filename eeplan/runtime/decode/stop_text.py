"""Tokens of one sequence to text, cut at a stop string; what might still become one is held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """A token and what it adds to the text."""

    text: str
    emission: Emission
    latency_s: float


class StopText:
    """Text of a sequence as its tokens come.

    Args:
        stop: texts that end the sequence; neither they nor anything after them is part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self.stopped = False
        """Whether a stop string was found; no more tokens are wanted."""

    def push(self, emission: Emission, latency_s: float) -> list[Piece]:
        """Take a token; give those whose text is certain by now."""
        text = self._decoder.decode(self._tokenizer.token_bytes([emission.token])[0])
        self._held.append(Piece(text, emission, latency_s))
        if self._cut_at_stop():
            return self._take(len(self._held))
        certain = sum(len(piece.text) for piece in self._held) - self._undecided()
        # The last token stays while it holds the beginning of a character, which may never be completed.
        most = len(self._held) - bool(self._decoder.getstate()[0])
        end = count = 0
        while count < most and end + len(self._held[count].text) <= certain:
            end += len(self._held[count].text)
            count += 1
        return self._take(count)

    def finish(self) -> list[Piece]:
        """Give what was held back, after the last token."""
        rest = self._decoder.decode(b"", final=True)
        if rest and self._held:
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
        self._cut_at_stop()
        return self._take(len(self._held))

    def _take(self, count: int) -> list[Piece]:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _cut_at_stop(self) -> bool:
        """Cut what is held at the first stop string in it; whether there is one."""
        text = "".join(piece.text for piece in self._held)
        found = [text.find(stop) for stop in self._stop if stop in text]
        if found:
            self.stopped = True
            self._held = _cut(self._held, min(found))
        return bool(found)

    def _undecided(self) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        text = "".join(piece.text for piece in self._held)
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _cut(pieces: Sequence[Piece], at: int) -> list[Piece]:
    """The pieces of the first ``at`` characters."""
    kept, start = [], 0
    for piece in pieces:
        if start >= at:
            break
        kept.append(replace(piece, text=piece.text[: at - start]))
        start += len(piece.text)
    return kept
