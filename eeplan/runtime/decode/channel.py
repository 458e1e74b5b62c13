"""Messages between the processes of a decoding pipeline: whole objects over a local socket, with time-outs.

A socket reports the death of the other side at once, which a collective library does only when it next needs
it; and a message of a decode step is a few kilobytes, for which nothing faster is needed. What travels is
pickled: both ends are this package, on one machine, started by one another.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eeplan.errors import DecodeError

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Ready:
    """First message of a process: it can begin."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Last message of a process: it cannot go on."""

    message: str


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a connection.

    Args:
        connection: a connected stream socket, owned from now on.
        timeout_s: how long the other side may keep a transfer waiting once it has begun.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._socket = connection
        self._timeout_s = timeout_s

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send an object.

        Raises:
            Closed: the other side is gone. DecodeError: it does not take the message.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self._too_slow() from None
        except OSError:
            raise Closed from None

    def receive(self) -> Any:
        """The next object; waits for it as long as it takes.

        Raises:
            Closed: the other side is gone. DecodeError: it stops in the middle of a message.
        """
        select.select([self._socket], [], [])
        return pickle.loads(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except TimeoutError:
                raise self._too_slow() from None
            except OSError:
                raise Closed from None
            if count == 0:
                raise Closed
            done += count
        return data

    def _too_slow(self) -> DecodeError:
        return DecodeError(f"a process of the decoding pipeline has not moved for {self._timeout_s:g} s")


def readable(channels: Sequence[Channel], timeout_s: float | None = 0.0) -> list[Channel]:
    """Those that have a message or have ended; waits so long for the first, None for ever."""
    return select.select(channels, [], [], timeout_s)[0]
