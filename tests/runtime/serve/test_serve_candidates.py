"""Candidates of a server and of its requests: whose hold, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serve_cases import SERVED, Running, ScriptedEngine, running

from eeplan.runtime.decode.policy import Candidates, candidates_of

FREQUENT = tuple(range(100))
TOLD = replace(SERVED, candidates=candidates_of(8, "frequent", FREQUENT), frequent=FREQUENT)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def plain(engine: ScriptedEngine) -> Iterator[Running]:
    with running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def told(engine: ScriptedEngine, plain: Running) -> Iterator[Running]:
    with running(ScriptedEngine(), TOLD) as found:
        yield found


def used(server: Running, **body: Any) -> Candidates:
    answer = server.post("/v1/completions", {"prompt": "Say", "max_tokens": 1, **body})
    assert answer.status == 200, answer.body
    requests = server.runner._engine.requests  # type: ignore[attr-defined]
    return requests[len(requests) - 1].options.policy.candidates


def test_a_request_has_none_unless_it_or_the_server_says_so(plain: Running, told: Running) -> None:
    assert used(plain) == Candidates()
    assert used(plain, candidates=16) == candidates_of(16)
    assert used(plain, candidates=16, measure_candidates=True) == candidates_of(16, measured=True)
    assert used(told) == TOLD.candidates
    assert used(told, candidates=0) == Candidates()
    assert used(told, candidates=3) == candidates_of(3, "frequent", FREQUENT)
    assert used(told, candidate_source="previous_exit") == candidates_of(8)
    assert used(told, measure_candidates=True).measured


@pytest.mark.parametrize(
    "body", [{"decode_mode": "full"}, {"decode_mode": "self_speculative"}, {"exit_confidence": "entropy"}]
)
def test_the_servers_do_not_stand_in_the_way(told: Running, body: dict[str, Any]) -> None:
    assert used(told, **body) == Candidates()
    answer = told.post("/v1/completions", {"prompt": "Say", "candidates": 8, **body})
    assert answer.status == 400
    assert "candidates" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"candidates": 258}, "at most the 257 tokens"),
        ({"candidates": -1}, "candidates"),
        ({"candidates": 4, "candidate_source": "frequent"}, "start it with --frequent-from"),
        ({"candidates": 4, "candidate_source": "luck"}, "expected one of previous_exit, frequent"),
        ({"measure_candidates": True}, "give a number of them as well"),
        ({"candidate_source": "previous_exit"}, "give a number of them as well"),
    ],
)
def test_requests_that_make_no_sense(plain: Running, body: dict[str, Any], message: str) -> None:
    answer = plain.post("/v1/completions", {"prompt": "Say", **body})
    assert answer.status == 400
    assert message in answer.json["error"]["message"]


def test_more_frequent_tokens_than_there_are(told: Running) -> None:
    answer = told.post("/v1/completions", {"prompt": "Say", "candidates": 101})
    assert answer.status == 400
    assert "101 wanted, 100 frequent tokens known" in answer.json["error"]["message"]
