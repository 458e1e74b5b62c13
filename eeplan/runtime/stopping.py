"""Being asked to save and end: SIGTERM or SIGUSR1, at the launcher or at any rank.

A handler only remembers. Ranks look once an iteration (``guard``) and agree, so all of them save after the
same one. Imports neither torch nor megatron-core, so that a worker listens before it loads them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STOP_FILE_VARIABLE = "EEPLAN_STOP_FILE"
"""Names a file that the launcher makes when it is asked to stop; ranks look for it every iteration."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to save and end.

    Args:
        file: that stands for a request made elsewhere; made by a signal here too when ``tells``.
    """

    def __init__(self, file: Path | None = None, *, tells: bool = False) -> None:
        self._file = file
        self._tells = tells
        self._is_signalled = False

    def on_signal(self, _number: int, _frame: Any = None) -> None:
        """Signal handler."""
        self._is_signalled = True
        if self._tells and self._file is not None:
            self._file.touch()

    @property
    def is_made(self) -> bool:
        """Whether a signal came here or to the launcher."""
        return self._is_signalled or (self._file is not None and self._file.exists())


@contextlib.contextmanager
def stop_requests(*, tells: bool = False) -> Iterator[StopRequest]:
    """Listen for the two signals meanwhile; a rank listens silently, a launcher tells its ranks."""
    name = os.environ.get(STOP_FILE_VARIABLE)
    with listening(StopRequest(Path(name) if name else None, tells=tells)) as request:
        yield request


@contextlib.contextmanager
def listening(request: StopRequest) -> Iterator[StopRequest]:
    """Let the two signals make ``request`` meanwhile. Only the main thread can listen."""
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.on_signal) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
