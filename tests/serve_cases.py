"""A scripted engine, and a server around any engine for the body of a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from eeplan.errors import DecodeError
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.modes import DEFAULT_MODE, MODES
from eeplan.runtime.decode.requests import Engine, Request, TokenEvent
from eeplan.runtime.serve.app import create_app
from eeplan.runtime.serve.chat import ChatTemplate
from eeplan.runtime.serve.server import _bind, _Runner, _Server
from eeplan.runtime.serve.settings import Limits, Served
from eeplan.runtime.tokenizer import byte_tokenizer

SCRIPT = "One token after another, and then \u00e4 stop.\nUser: no more."
SERVED = Served(
    name="fake",
    checkpoint="iter_0000001",
    num_layers=6,
    exit_depths=(2, 4),
    seq_length=128,
    tokenizer=byte_tokenizer(),
    template=ChatTemplate(None),
    certificate=None,
    thresholds=(0.5,),
    created=1_700_000_000,
    modes=MODES,
    default_mode=DEFAULT_MODE,
)


class ScriptedEngine:
    """Emits a text's bytes, then the end token; every third token leaves at depth 2.

    Args:
        gate: every step waits for it first.
        fail_after: the step that dies, and how.
    """

    def __init__(
        self,
        script: str = SCRIPT,
        max_running: int = 4,
        gate: threading.Event | None = None,
        fail_after: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.script, self.max_running, self.gate, self.fail_after = (
            script.encode(),
            max_running,
            gate,
            fail_after,
        )
        self.step_s = step_s
        self.queue: deque[int] = deque()
        self.at: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.cancelled: list[int] = []
        self.steps = self.most_running = 0
        self.closed = False

    def submit(self, request: Request) -> int:
        if not request.prompt:
            raise DecodeError("the prompt is empty")
        number = len(self.requests)
        self.requests[number] = request
        self.queue.append(number)
        return number

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)
        self.at.pop(request, None)
        if request in self.queue:
            self.queue.remove(request)

    def step(self) -> list[TokenEvent]:
        if self.gate is not None:
            self.gate.wait(30.0)
        if self.step_s:
            time.sleep(self.step_s)
        while self.queue and len(self.at) < self.max_running:
            self.at[self.queue.popleft()] = 0
        self.most_running = max(self.most_running, len(self.at))
        if self.at:
            self.steps += 1
        if self.fail_after is not None and self.steps > self.fail_after:
            raise DecodeError("process 1 of 2 died")
        return [self._advance(number) for number in tuple(self.at)]

    def _advance(self, number: int) -> TokenEvent:
        index, request = self.at[number], self.requests[number]
        if index == len(self.script):
            del self.at[number]
            return TokenEvent(number, None, "stop", 0.001)
        depth = 2 if index % 3 == 0 else 6
        token, count = self.script[index], request.options.top_logprobs
        top = tuple(((token + rank) % 256, -0.25 - rank) for rank in range(count))
        emission = Emission(token, "exit_2" if depth == 2 else "final", depth, 0.75, -0.25, False, top)
        self.at[number] = index + 1
        last = index + 1 == request.options.max_new_tokens
        if last:
            del self.at[number]
        return TokenEvent(number, emission, "length" if last else None, 0.001)

    @property
    def running(self) -> int:
        return len(self.at)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def close(self) -> None:
        self.closed = True


@dataclass
class Running:
    """A server that answers."""

    url: str
    runner: _Runner

    def stop(self) -> None:
        """As SIGTERM does."""
        assert self.runner.server is not None
        self.runner.server.handle_exit(15, None)

    @property
    def api(self) -> str:
        """Where OpenAI's client looks."""
        return f"{self.url}/v1"

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, data, {"content-type": "application/json", **headers})

    def get(self, path: str, **headers: str) -> Answer:
        """Ask."""
        return self.send("GET", path, None, headers)

    def send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """A counter's value; 0 if it has none."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without the last, which must say that it is."""
        *events, done = self.body.decode().strip().split("\n\n")
        assert done == "data: [DONE]", done
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.contextmanager
def running(
    engine: Engine, served: Served = SERVED, limits: Limits | None = None, api_key: str | None = None
) -> Iterator[Running]:
    """A server on a free port of this machine, in a thread."""
    import uvicorn

    limits = limits or Limits(grace_s=5.0)
    limits = replace(limits, max_running=getattr(engine, "max_running", limits.max_running))
    bound = _bind("127.0.0.1", 0)
    runner = _Runner(engine, served, limits)
    app = create_app(served, limits, runner.service, api_key, runner.lifespan)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, backlog=2048, timeout_graceful_shutdown=10
    )
    ready = threading.Event()
    runner.server = _Server(config, runner, ready.set)
    thread = threading.Thread(target=runner.server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(30.0), "the server did not start"
    try:
        yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", runner)
    finally:
        gate = getattr(engine, "gate", None)
        if gate is not None:
            gate.set()
        runner.server.handle_exit(15, None)
        thread.join(30.0)
        assert not thread.is_alive(), "the server did not end"


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until something holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.005)
