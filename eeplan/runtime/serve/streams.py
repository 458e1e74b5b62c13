"""Sending an answer while watching whether the client is still there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from eeplan.runtime.serve.problems import problem_of

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say for so long sends a comment, so that nobody on the way gives it up."""
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of ``work``, which is cancelled as soon as the client disconnects.

    Args:
        receive: of ASGI, after the body was read.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        # Cancelled work frees its sequences before anything else happens.
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
        chunks: JSON documents, one an event.
        release: awaited in the end, whatever happened.
        on_gone: called if the client leaves before.
    """

    def __init__(
        self,
        chunks: AsyncIterator[Any],
        headers: Mapping[str, str],
        release: Callable[[], Awaitable[None]],
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__(chunks, 200, {"cache-control": "no-cache", **headers}, "text/event-stream")
        self._chunks, self._release, self._on_gone = chunks, release, on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks, or as many as the client stays for."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._on_gone()
        finally:
            await self._release()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in _with_pauses(self._chunks):
                await send(_body(data))
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                raise
            # The status line is long gone; OpenAI's clients raise on such an event.
            await send(_body(_event(problem.body)))
        else:
            await send(_body(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_pauses(chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Events as bytes, with a comment whenever there is nothing for long."""
    waiting: asyncio.Task[Any] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(chunks, None))
            done, _ = await asyncio.wait({waiting}, timeout=KEEP_ALIVE_S)
            if not done:
                yield b": waiting\n\n"
                continue
            chunk = waiting.result()
            waiting = None
            if chunk is None:
                return
            yield _event(chunk)
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _event(content: Any) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
