"""The one thread that talks to the engine: takes commands between steps, hands tokens out after each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from eeplan.errors import DecodeError
from eeplan.runtime.decode.requests import Engine, Request, TokenEvent

IDLE_CHECK_S = 0.5
"""How often an idle engine is stepped, so that a process that died is noticed."""
EMPTY_STEP_PAUSE_S = 0.0005


class EngineGone(Exception):
    """The engine died; nothing can be decoded any more."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence at the engine, as its caller knows it."""

    deliver: Callable[[TokenEvent], None]
    """Called on the event loop's thread."""
    number: int | None = None
    """As the engine calls it; only the thread's business."""


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    ticket: Ticket
    accepted: Future[None]


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: Ticket


Delivery = list[tuple[Ticket, TokenEvent]]


class EngineThread:
    """Runs an engine until it is stopped or dies.

    Args:
        hand_out: called on this thread with the events of a step.
        on_death: called on this thread, once, with the reason.
    """

    def __init__(
        self, engine: Engine, hand_out: Callable[[Delivery], None], on_death: Callable[[str], None]
    ) -> None:
        self._engine, self._hand_out, self._on_death = engine, hand_out, on_death
        self._commands: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.step_began_s: float | None = None
        """When the step in progress began, by the monotonic clock; None between steps."""
        self.running = self.waiting = 0
        """As the engine counts them, after its last step."""
        self.death: str | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, ticket: Ticket) -> Future[None]:
        """Hand a sequence to the engine.

        Returns:
            Done when the engine has taken it; fails with DecodeError if it refuses, EngineGone if it died.
            Cancelled before that, the sequence does not reach the engine.
        """
        accepted: Future[None] = Future()
        self._commands.put(_Submit(request, ticket, accepted))
        return accepted

    def cancel(self, ticket: Ticket) -> None:
        """Drop a sequence before the next step; nothing more is delivered after that."""
        self._commands.put(_Cancel(ticket))

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the engine; whether it ended in time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
        finally:
            self._engine.close()

    def _take_commands(self) -> bool:
        """Carry out what was asked for; wait for something to do. Whether to go on."""
        idle = self.death is not None or not self._tickets
        while True:
            try:
                command = self._commands.get(block=idle, timeout=IDLE_CHECK_S if idle else None)
            except queue.Empty:
                return True
            idle = False
            if command is None:
                return False
            if isinstance(command, _Submit):
                self._submit(command)
            elif command.ticket.number is not None:
                self._forget(command.ticket.number)

    def _submit(self, command: _Submit) -> None:
        if not command.accepted.set_running_or_notify_cancel():
            return
        if self.death is not None:
            command.accepted.set_exception(EngineGone(self.death))
            return
        try:
            number = self._engine.submit(command.request)
        except DecodeError as error:
            command.accepted.set_exception(error)
        except Exception as error:
            command.accepted.set_exception(EngineGone(str(error)))
            self._die(error)
        else:
            command.ticket.number = number
            self._tickets[number] = command.ticket
            command.accepted.set_result(None)

    def _forget(self, number: int) -> None:
        if self._tickets.pop(number, None) is not None and self.death is None:
            self._engine.cancel(number)

    def _step(self) -> None:
        if self.death is not None:
            return
        self.step_began_s = time.monotonic()
        try:
            events = self._engine.step()
        except Exception as error:
            self._die(error)
            return
        finally:
            self.step_began_s = None
        self.running, self.waiting = self._engine.running, self._engine.waiting
        delivery: Delivery = []
        for event in events:
            ticket = self._tickets.get(event.request)
            if ticket is not None:
                delivery.append((ticket, event))
                if event.finish is not None:
                    del self._tickets[event.request]
        if delivery:
            self._hand_out(delivery)
        elif self._tickets:
            time.sleep(EMPTY_STEP_PAUSE_S)

    def _die(self, error: Exception) -> None:
        self.death = " ".join(str(error).split()) or type(error).__name__
        self.running = self.waiting = 0
        self._tickets.clear()
        self._on_death(self.death)
