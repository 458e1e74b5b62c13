"""Checkpoints written while training goes on: one at a time, from a copy, by a thread of every rank.

The threads talk to each other over a process group of their own, so that their messages never meet those of
training. How a checkpoint gets to disk is the same as in the foreground (``checkpoint.write``): whatever is
killed when, a valid one is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from eeplan.runtime.checkpoint import Snapshot, write
from eeplan.runtime.checkpoint_files import FileOperations


class BackgroundSaver:
    """Writes snapshots of this rank; made on all ranks together.

    Args:
        operations: of every save; None for the plain ones.
    """

    def __init__(self, operations: FileOperations | None = None) -> None:
        self._operations = operations
        # On the CPU whatever training uses: what is saved has been copied there.
        self._group: Any = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, folder: Path, snapshot: Snapshot) -> None:
        """Begin to write; waits for the one before. All ranks save the same iterations in the same order.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        work = lambda: write(folder, snapshot, operations=self._operations, group=self._group)  # noqa: E731
        # Not a daemon: an error that ends training leaves what was being saved time to be complete.
        self._thread = threading.Thread(target=self._noting, args=(work,), name=f"save {snapshot.iteration}")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: what was being written cannot be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background, once; asked between iterations.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _noting(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
