"""Sequences on the event loop: room for them, their tokens as they come, and the end of them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from eeplan.runtime.decode.requests import Engine, Request, TokenEvent
from eeplan.runtime.serve.engine_thread import Delivery, EngineGone, EngineThread, Ticket
from eeplan.runtime.serve.metrics import Metrics
from eeplan.runtime.serve.settings import Limits

WATCH_S = 0.25
ArgumentT = TypeVar("ArgumentT")


class QueueFull(Exception):
    """As many sequences wait as may."""


class Draining(Exception):
    """The server ends; it takes nothing new, or has run out of patience with what runs."""


@dataclass(frozen=True, slots=True)
class Token:
    """An event of one of a request's sequences."""

    choice: int
    event: TokenEvent


class Sequences:
    """The sequences of one HTTP request: their events in the order they come, from one queue."""

    def __init__(self, count: int) -> None:
        self.tickets: list[Ticket] = []
        self.events: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self.open = set(range(count))
        """Choices that go on."""

    async def next(self) -> Token:
        """The next event.

        Raises:
            EngineGone: the engine died. Draining: the server ends.
        """
        found = await self.events.get()
        if isinstance(found, Exception):
            raise found
        return found


class Service:
    """Hands requests to the engine's thread and tokens back; lives on one event loop.

    Args:
        engine: from here on only the thread's.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.draining = False
        self.death: str | None = None
        self.died = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._open: set[Sequences] = set()
        self._thread = EngineThread(
            engine,
            lambda delivery: self._later(self._deliver, delivery),
            lambda reason: self._later(self._die, reason),
        )
        self._watch = asyncio.create_task(self._watch_stalls())
        self._thread.start()

    @property
    def occupied(self) -> int:
        """Sequences that run or wait."""
        return sum(len(sequences.open) for sequences in self._open)

    @property
    def running(self) -> int:
        """Sequences that hold keys and values, by the engine's last word."""
        return self._thread.running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place, by the engine's last word."""
        return self._thread.waiting

    async def begin(self, requests: Sequence[Request]) -> Sequences:
        """Hand in the sequences of one HTTP request, all or none.

        Raises:
            QueueFull, Draining, EngineGone: see there. DecodeError: the engine refuses one.
        """
        if self.death is not None:
            raise EngineGone(self.death)
        if self.draining:
            raise Draining("the server is shutting down")
        if self.occupied + len(requests) > self.limits.max_running + self.limits.max_waiting:
            self.metrics.rejected.inc()
            raise QueueFull
        sequences = Sequences(len(requests))
        self._open.add(sequences)
        accepted = []
        for choice, request in enumerate(requests):
            ticket = Ticket(self._receiver(sequences, choice))
            sequences.tickets.append(ticket)
            accepted.append(asyncio.wrap_future(self._thread.submit(request, ticket)))
        try:
            await asyncio.gather(*accepted)
        except BaseException:
            self.end(sequences)
            # Every one has an answer or was cancelled; none may be left unread.
            await asyncio.gather(*accepted, return_exceptions=True)
            raise
        return sequences

    def drop(self, sequences: Sequences, choice: int) -> None:
        """One sequence is not wanted any further: it ended on a stop string."""
        if choice in sequences.open:
            sequences.open.discard(choice)
            self._thread.cancel(sequences.tickets[choice])

    def end(self, sequences: Sequences) -> None:
        """Nothing of these sequences is wanted any further; for those that ended this does nothing."""
        for choice in tuple(sequences.open):
            self.drop(sequences, choice)
        self._open.discard(sequences)

    async def drain(self) -> None:
        """Take nothing new, let what runs finish for as long as the limits say, and end the rest."""
        self.draining = True
        until_s = time.monotonic() + self.limits.grace_s
        while self._open and self.death is None and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        self._end_all(Draining("the server is shutting down"))

    async def close(self) -> bool:
        """End the engine's thread; whether it ended."""
        self._watch.cancel()
        self._end_all(Draining("the server is shutting down"))
        return await asyncio.to_thread(self._thread.stop, 10.0)

    def _later(self, call: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        """From the engine's thread to the loop's; the loop may be gone when the server has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, argument)

    def _receiver(self, sequences: Sequences, choice: int) -> Callable[[TokenEvent], None]:
        def receive(event: TokenEvent) -> None:
            if choice in sequences.open:
                if event.finish is not None:
                    sequences.open.discard(choice)
                sequences.events.put_nowait(Token(choice, event))

        return receive

    def _deliver(self, delivery: Delivery) -> None:
        self.metrics.running.set(self._thread.running)
        self.metrics.waiting.set(self._thread.waiting)
        for ticket, event in delivery:
            ticket.deliver(event)

    def _die(self, reason: str) -> None:
        self.death = self.death or reason
        self._end_all(EngineGone(reason))
        self.died.set()

    def _end_all(self, why: Exception) -> None:
        for sequences in tuple(self._open):
            sequences.events.put_nowait(why)

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            began_s = self._thread.step_began_s
            if began_s is not None and time.monotonic() - began_s > self.limits.stall_s:
                self._die(f"the engine has not answered for {self.limits.stall_s:g} s")
                return
