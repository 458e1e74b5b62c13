"""The processes of a decoding pipeline's later stages: started, watched and ended by the one before them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eeplan.errors import DecodeError
from eeplan.runtime.decode.channel import Channel, Closed, Failed, Ready, readable
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.stage_rows import Message
from eeplan.runtime.decode.stage_worker import StageJob


class StageProcesses:
    """All processes of a pipeline but this one, which is the first of the first stage.

    Args:
        job: of this process; the others' differ in their place.
    """

    def __init__(self, job: StageJob) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._drivers: list[Channel] = []
        self._places: list[tuple[int, int]] = []
        """Stage and rank in its team, by process."""
        self._second: Channel | None = None
        self.team: list[Channel] = []
        """To the other processes of the first stage."""
        try:
            self._start(job)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by stage."""
        return tuple(process.pid for process in self._processes)

    def send(self, messages: list[Message]) -> None:
        """To the second stage."""
        if self._second is not None:
            with self.explained():
                self._second.send(messages)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Around what talks to these processes: name the one that died, and end all if one did or hangs.

        Raises:
            DecodeError: in place of a connection's end.
        """
        try:
            yield
        except Closed:
            raise self._death(0) from None
        except DecodeError:
            self.close()
            raise

    def receive(self, wait_s: float) -> list[tuple[int, Emission]]:
        """Tokens that have come in; waits so long for the first."""
        if not self._drivers:
            return []
        found: list[tuple[int, Emission]] = []
        ready = readable(self._drivers, wait_s)
        while ready:
            for channel in ready:
                message = self._message(channel)
                assert isinstance(message, tuple), f"a token was expected, not {message}"
                found.append(message)
            ready = readable(self._drivers)
        return found

    def wait_until_ready(self) -> None:
        """Wait until every stage is loaded."""
        for channel in self._drivers:
            message = self._message(channel)
            assert isinstance(message, Ready), f"a stage begins with {message}"

    def close(self) -> None:
        """End the processes."""
        for channel in (*self._drivers, *self.team, *([self._second] if self._second else [])):
            channel.close()
        self._drivers, self.team, self._second = [], [], None
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []

    def _start(self, job: StageJob) -> None:
        stages, ranks = range(job.num_stages), range(1, job.tensor_size)
        self._places = [(stage, rank) for stage in stages for rank in (0, *ranks)][1:]
        # One connection from each stage to the next, one from its first process to each other of it, and one
        # from every process back to the driver.
        ahead = {stage: socket.socketpair() for stage in stages[1:]}
        inside = {(stage, rank): socket.socketpair() for stage in stages for rank in ranks}
        back = {place: socket.socketpair() for place in self._places}
        kept = [*(pair[0] for pair in back.values()), *(inside[0, rank][0] for rank in ranks)]
        kept += [ahead[1][0]] if ahead else []
        with contextlib.ExitStack() as stack:
            for one in (one for pairs in (ahead, inside, back) for pair in pairs.values() for one in pair):
                if one not in kept:
                    stack.callback(one.close)
            for stage, rank in self._places:
                own = replace(
                    job,
                    stage=stage,
                    tensor_rank=rank,
                    driver=back[stage, rank][1].fileno(),
                    previous=(inside[stage, rank] if rank else ahead[stage])[1].fileno(),
                    following=ahead[stage + 1][0].fileno() if not rank and stage + 1 in ahead else None,
                    peers=() if rank else tuple(inside[stage, other][0].fileno() for other in ranks),
                )
                self._processes.append(_started(own))
        self._drivers = [Channel(pair[0], job.timeout_s) for pair in back.values()]
        self.team = [Channel(inside[0, rank][0], job.timeout_s) for rank in ranks]
        if ahead:
            self._second = Channel(ahead[1][0], job.timeout_s)

    def _message(self, channel: Channel) -> Any:
        index = self._drivers.index(channel)
        try:
            message = channel.receive()
        except Closed:
            raise self._death(index) from None
        if isinstance(message, Failed):
            self.close()
            raise DecodeError(message.message)
        return message

    def _death(self, index: int) -> DecodeError:
        """What to say of a lost connection: the first process that ended by itself explains the others."""
        for later in range(len(self._processes)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[later].wait(timeout=2.0 if later == index else 0.2)
        codes = [process.poll() for process in self._processes]
        by_signal = [place for place, code in enumerate(codes) if code is not None and code < 0]
        place = by_signal[0] if by_signal else index
        pid, code = self._processes[place].pid, codes[place]
        stage, rank = self._places[place]
        self.close()
        which = f"share {rank + 1} of pipeline stage {stage + 1}" if rank else f"pipeline stage {stage + 1}"
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return DecodeError(f"{which} (process {pid}) {how}; its sequences are lost, all stages were ended")


def _started(job: StageJob) -> subprocess.Popen[bytes]:
    numbers = [job.driver, job.previous, *job.peers, *([] if job.following is None else [job.following])]
    return subprocess.Popen(
        [sys.executable, "-m", "eeplan.runtime.decode.stage_worker", job.to_json()],
        env={**os.environ, "OMP_NUM_THREADS": str(job.threads)},
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
    )
