"""What people see of a generation: plain in a pipe, coloured and token by token on a terminal."""

from __future__ import annotations

import io
from typing import Any

from eeplan.generation_view import GenerationView

TOKENS = [
    {"text": " a", "exit": "exit_4"},
    {"text": " b", "exit": "exit_10"},
    {"text": " c", "exit": "final"},
    {"text": " d", "exit": "exit_4"},
]
RESULT: dict[str, Any] = {
    "text": " a b c d",
    "exits": {"exit_4": 2, "exit_10": 1, "final": 1},
    "mode": "catch_up",
    "tokens_per_s": 12.34,
    "mean_depth": 7.5,
    "drafts": None,
}


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_text_in_a_pipe() -> None:
    stream = io.StringIO()
    view = GenerationView("Say", stream)
    for token in TOKENS:
        view.token(token)
    assert stream.getvalue() == ""
    view.finish(RESULT)
    assert stream.getvalue() == (
        "Say a b c d\n\ntokens by exit: exit_4 2, exit_10 1, final 1\n"
        "mode catch_up: 12.3 tokens/s, mean depth 7.50\n"
    )


def test_colours_as_they_come_on_a_terminal() -> None:
    stream = FakeTerminal()
    view = GenerationView("Say", stream)
    assert stream.getvalue() == "", "an error may still come"
    view.token(TOKENS[0])
    assert "Say" in stream.getvalue()
    assert "\x1b[36m a" in stream.getvalue()
    for token in TOKENS[1:]:
        view.token(token)
    view.finish(RESULT)
    shown = stream.getvalue()
    assert "\x1b[32m b" in shown
    assert "\x1b[36mexit_4 2" in shown
    assert "final 1" in shown


def test_candidates_are_told() -> None:
    found = {"number": 16, "shortlists": 40, "refused": 30, "wrong": None, "wrong_share": None}
    shown = []
    for facts in (found, found | {"wrong": 3, "wrong_share": 0.1}, found | {"shortlists": 0}):
        stream = io.StringIO()
        GenerationView("", stream).finish(RESULT | {"candidates": facts})
        shown.append(stream.getvalue().splitlines()[-1])
    assert shown[0].endswith("; 16 candidates ended 30 of 40 checks")
    assert shown[1].endswith("; 16 candidates ended 30 of 40 checks, 3 of these wrongly (10.0%)")
    assert shown[2].endswith("; no exit had the 16 candidates to look at")


def test_drafts_are_told() -> None:
    stream = io.StringIO()
    GenerationView("", stream).finish(RESULT | {"drafts": {"drafted": 8, "accepted": 6}})
    assert "6 of 8 drafts accepted" in stream.getvalue()
