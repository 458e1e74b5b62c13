"""Full queues, keys, clients that leave, engines that die, and the end of a server with a scripted engine."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from serve_cases import SCRIPT, SERVED, Running, ScriptedEngine, eventually, running

from eeplan.errors import DecodeError
from eeplan.runtime.serve.server import serve
from eeplan.runtime.serve.settings import Limits

BODY = {"prompt": "Say", "max_tokens": 100}


def started(server: Running, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A request whose answer is not read."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    return connection


def test_a_full_queue_is_answered_with_429() -> None:
    gate = threading.Event()
    engine = ScriptedEngine(gate=gate, max_running=2)
    with running(engine, limits=Limits(max_waiting=3)) as server, ThreadPoolExecutor(8) as pool:
        held = [pool.submit(server.post, "/v1/completions", BODY) for _ in range(5)]
        eventually(lambda: server.runner.service().occupied == 5, "five sequences are in")
        refused = server.post("/v1/completions", BODY | {"stream": True})
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert refused.json["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=server.api, api_key="x", max_retries=0).completions.create(
                model="fake", prompt="Say"
            )
        gate.set()
        assert [answer.result().json["choices"][0]["text"] for answer in held] == [SCRIPT] * 5
        assert server.post("/v1/completions", BODY).status == 200, "there is room again"
        assert server.metric("eeplan_queue_full_total") == 2
    assert engine.most_running == 2


def test_all_choices_of_a_request_are_taken_or_none() -> None:
    gate = threading.Event()
    engine = ScriptedEngine(gate=gate, max_running=1)
    with running(engine, limits=Limits(max_waiting=2)) as server:
        assert server.post("/v1/completions", BODY | {"n": 4}).status == 429
        assert server.runner.service().occupied == 0
        assert server.post("/v1/completions", BODY | {"n": 17}).status == 400
        gate.set()
        assert len(server.post("/v1/completions", BODY | {"n": 3}).json["choices"]) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_token(stream: bool) -> None:
    engine = ScriptedEngine("x" * 5000, step_s=0.01)
    with running(engine, limits=Limits(max_tokens=5000)) as server:
        connection = started(server, BODY | {"max_tokens": 5000, "stream": stream, "n": 2})
        eventually(lambda: engine.running == 2, "both sequences run")
        if stream:
            assert connection.getresponse().read(20).startswith(b"data: ")
        connection.close()
        eventually(lambda: engine.running == 0, "both sequences are dropped", timeout_s=2.0)
        assert sorted(engine.cancelled) == [0, 1]
        assert server.runner.service().occupied == 0
        eventually(lambda: server.metric("eeplan_disconnects_total") == 1, "it was counted")
        assert max(engine.at.values(), default=0) == 0
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200


def test_a_cancelled_sequence_takes_no_further_step() -> None:
    """Not within seconds: at most the step that was under way."""
    gate = threading.Event()
    engine = ScriptedEngine("x" * 100, gate=gate)
    with running(engine) as server:
        connection = started(server, BODY)
        eventually(lambda: bool(engine.requests), "it was submitted")
        connection.close()
        eventually(lambda: server.runner.service().occupied == 0, "the server noticed")
        gate.set()
        eventually(lambda: engine.cancelled == [0], "it was cancelled")
        assert engine.steps <= 1


def test_waiting_clients_that_leave_are_dropped_too() -> None:
    gate = threading.Event()
    engine = ScriptedEngine(gate=gate, max_running=1)
    with running(engine, limits=Limits(max_waiting=2)) as server:
        connections = [started(server, BODY | {"stream": True}) for _ in range(3)]
        eventually(lambda: server.runner.service().occupied == 3, "three are in")
        for connection in connections:
            connection.close()
        eventually(lambda: server.runner.service().occupied == 0, "all are out")
        gate.set()
        assert server.post("/v1/completions", BODY).json["choices"][0]["text"] == SCRIPT


def test_an_api_key_is_asked_for() -> None:
    with running(ScriptedEngine(), api_key="secret") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for answer in (
                server.get("/v1/models", **headers),
                server.post("/v1/completions", BODY, **headers),
            ):
                assert answer.status == 401
                assert answer.json["error"]["code"] == "invalid_api_key"
        assert server.get("/metrics").status == 401
        assert server.get("/health").status == 200
        assert server.get("/").status == 200
        right = {"authorization": "Bearer secret"}
        assert server.post("/v1/completions", BODY, **right).status == 200
        assert b"eeplan_http_requests_total" in server.get("/metrics", **right).body
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.api, api_key="wrong", max_retries=0).models.list()
        assert openai.OpenAI(base_url=server.api, api_key="secret").models.list().data


def test_the_engines_death_is_503_and_the_end() -> None:
    engine = ScriptedEngine("x" * 1000, fail_after=30, step_s=0.002)
    with running(engine) as server:
        with ThreadPoolExecutor(4) as pool:
            whole = [pool.submit(server.post, "/v1/completions", BODY) for _ in range(2)]
            streams = [pool.submit(server.post, "/v1/completions", BODY | {"stream": True}) for _ in range(2)]
            for answer in (one.result(timeout=20) for one in whole):
                assert answer.status == 503
                assert answer.json["error"]["code"] == "engine_died"
                assert "process 1 of 2 died" in answer.json["error"]["message"]
            for answer in (one.result(timeout=20) for one in streams):
                assert b"engine_died" in answer.body
                assert b"[DONE]" not in answer.body
        assert server.post("/v1/completions", BODY).status == 503
        assert server.get("/health").status == 503
        assert server.runner.server is not None
        eventually(lambda: not server.runner.server.started or server.runner.server.should_exit, "it ends")
    assert server.runner.death == "process 1 of 2 died"
    assert engine.closed


def test_an_idle_engines_death_is_noticed() -> None:
    with running(ScriptedEngine(fail_after=-1)) as server:
        eventually(lambda: server.runner.death is not None, "the server ends")


def test_an_engine_that_hangs_counts_as_dead() -> None:
    gate = threading.Event()
    with running(ScriptedEngine(gate=gate), limits=Limits(stall_s=0.3)) as server:
        answer = server.post("/v1/completions", BODY)
        assert answer.status == 503
        assert "has not answered for 0.3 s" in answer.json["error"]["message"]
        eventually(lambda: server.runner.death is not None, "the server ends")


def test_sigterm_lets_answers_finish() -> None:
    engine = ScriptedEngine("x" * 100, step_s=0.005)
    with running(engine) as server, ThreadPoolExecutor(4) as pool:
        held = [pool.submit(server.post, "/v1/completions", BODY) for _ in range(4)]
        eventually(lambda: engine.running == 4, "four run")
        server.stop()
        assert [one.result(timeout=20).json["choices"][0]["text"] for one in held] == ["x" * 100] * 4
    assert engine.closed


def test_after_the_grace_time_answers_are_ended() -> None:
    engine = ScriptedEngine("x" * 100_000, step_s=0.005)
    limits = Limits(grace_s=0.3, max_tokens=100_000)
    with running(engine, limits=limits) as server, ThreadPoolExecutor(4) as pool:
        body = BODY | {"max_tokens": 100_000}
        whole = pool.submit(server.post, "/v1/completions", body)
        stream = pool.submit(server.post, "/v1/completions", body | {"stream": True})
        eventually(lambda: engine.running == 2, "two run")
        began = time.monotonic()
        server.stop()
        assert whole.result(timeout=20).status == 503
        assert b"shutting_down" in stream.result(timeout=20).body
        assert time.monotonic() - began < 5.0
    assert sorted(engine.cancelled) == [0, 1]


def test_the_published_schema_is_whole() -> None:
    with running(ScriptedEngine()) as server:
        text = server.get("/openapi.json").body.decode()
    schemas = json.loads(text)["components"]["schemas"]
    assert "early_exit_threshold" in schemas["CompletionRequest"]["properties"]
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        assert name in schemas


def test_an_address_in_use_is_a_users_error() -> None:
    with running(ScriptedEngine()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(DecodeError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve(ScriptedEngine(), SERVED, Limits(), port=port)
    with pytest.raises(DecodeError, match="API key is empty"):
        serve(ScriptedEngine(), SERVED, Limits(), api_key=" ")


@pytest.mark.parametrize("limit", ["max_running", "max_tokens", "max_choices", "max_body_bytes"])
def test_limits_are_checked(limit: str) -> None:
    with pytest.raises(DecodeError, match=f"{limit} is 0"):
        Limits(**{limit: 0})


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_waits_are_checked(number: float) -> None:
    with pytest.raises(DecodeError, match=r"grace_s is .*; expected a number from 0"):
        Limits(grace_s=number)
