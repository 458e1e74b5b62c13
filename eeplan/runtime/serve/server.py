"""Running the application: one socket, signals, a graceful end, and an end when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

import uvicorn

from eeplan.errors import DecodeError
from eeplan.runtime.decode.requests import Engine
from eeplan.runtime.serve.app import create_app
from eeplan.runtime.serve.metrics import Metrics
from eeplan.runtime.serve.service import Service
from eeplan.runtime.serve.settings import LOOPBACK, Limits, Served
from eeplan.runtime.stage import exit_name

BACKLOG = 2048
LAST_WORDS_S = 1.0
"""After the engine's death, how long new requests are still answered, with 503."""


def serve(
    engine: Engine,
    served: Served,
    limits: Limits,
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    api_key: str | None = None,
    on_ready: Callable[[str], None] = lambda url: print(f"serving on {url}", file=sys.stderr, flush=True),
) -> None:
    """Serve until SIGTERM or SIGINT, or until the engine dies.

    Args:
        host, port: where to listen; port 0 takes a free one.
        on_ready: called with the server's URL when it answers.

    Raises:
        DecodeError: the address cannot be bound, or the engine died.
    """
    if api_key is not None and not api_key.strip():
        raise DecodeError("the API key is empty; give one, or none at all")
    bound = _bind(host, port)
    runner = _Runner(engine, served, limits)
    app = create_app(served, limits, runner.service, api_key, runner.lifespan)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        # The service ends its answers itself, this only bounds what a client may still delay.
        timeout_graceful_shutdown=int(limits.grace_s) + 5,
        server_header=False,
    )
    shown = f"[{host}]" if ":" in host else host
    runner.server = _Server(config, runner, lambda: on_ready(f"http://{shown}:{bound.getsockname()[1]}"))
    runner.server.run(sockets=[bound])
    if runner.death is not None:
        raise DecodeError(f"the engine died: {runner.death}; start the server again")


class _Runner:
    """What the application, the server and the signals share."""

    def __init__(self, engine: Engine, served: Served, limits: Limits) -> None:
        self._engine, self._served, self._limits = engine, served, limits
        self._service: Service | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.server: _Server | None = None
        self.death: str | None = None

    def service(self) -> Service:
        """The service, which is there as long as the server runs."""
        assert self._service is not None, "no request comes before the server has started"
        return self._service

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """The service, for as long as the application lives."""
        metrics = Metrics()
        thresholds = self._served.thresholds * (
            len(self._served.exit_depths) if len(self._served.thresholds) == 1 else 1
        )
        for depth, threshold in zip(self._served.exit_depths, thresholds, strict=True):
            metrics.threshold.labels(exit_name(depth)).set(threshold)
        self._service = service = Service(self._engine, self._limits, metrics)
        self._tasks.append(asyncio.create_task(self._end_with_the_engine(service)))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await service.close()

    def drain(self) -> None:
        """Begin to end; from a signal handler's context."""
        if self._service is not None:
            loop = self._service.loop
            loop.call_soon_threadsafe(lambda: self._tasks.append(loop.create_task(self.service().drain())))

    async def _end_with_the_engine(self, service: Service) -> None:
        await service.died.wait()
        self.death = service.death
        await asyncio.sleep(LAST_WORDS_S)
        assert self.server is not None, "the server runs"
        self.server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, whose end begins with the service's, and which says when it answers."""

    def __init__(self, config: uvicorn.Config, runner: _Runner, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._runner, self._on_ready = runner, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: end gracefully. Second: at once. The process ends by returning, not by the signal."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._runner.drain()


def _bind(host: str, port: int) -> socket.socket:
    if not host:
        # To the socket it would mean every address of the machine.
        raise DecodeError("the host is empty; give an address to listen on, as 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DecodeError(
            f"cannot listen on {host} port {port} ({reason}); give another --host or --port"
        ) from None
