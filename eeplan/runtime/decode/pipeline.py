"""Pipeline decoding over P processes (EE-LLM 4): a token that leaves returns to the first stage at once, and
the next one starts there while the later stages complete the old one's keys and values.

The process that makes the engine runs the first stage itself, so a token that leaves there takes no detour;
the others are started by it, read their part of the checkpoint, and are gone when it is. Rows travel from
stage to stage, tokens from wherever they are decided straight back (``stage_rows``). Sequences that are under
way at the same time fill the stages together.

With one stage nothing is started, and every token runs through all layers, whatever exit it is emitted at.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eeplan.errors import DecodeError
from eeplan.runtime.decode.channel import Channel, Closed, Failed, Ready, readable
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import capacity_of, check_request
from eeplan.runtime.decode.network import Transformer
from eeplan.runtime.decode.requests import Finish, Request, TokenEvent
from eeplan.runtime.decode.sampling import uniform_of
from eeplan.runtime.decode.stage_rows import Closing, Message, Opening, Rows, StageRunner
from eeplan.runtime.decode.stage_worker import StageJob
from eeplan.runtime.decode.stages import decode_stages, open_checkpoint, stage_weights
from eeplan.runtime.launch import available_cores

PIPELINE_MODES = ("pipeline", "full")


@dataclass(slots=True)
class _Running:
    request: Request
    generator: torch.Generator
    capacity: int
    since_s: float
    length: int = 0
    """Tokens fed so far."""
    emitted: int = 0


class PipelineEngine:
    """Engine of P pipeline stages, each in a process of its own. Modes ``pipeline`` and ``full``.

    Args:
        checkpoint: a checkpoint folder of any layout, or a run's folder.
        pipeline_size: P, the number of stages.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
        max_running: sequences that decode at once; others wait.
        dtype: name of the torch dtype to compute in; default, as stored.
        timeout_s: how long a stage that has work may keep silent before the engine gives up.

    Raises:
        DecodeError: there are fewer layers than stages, or a stage could not be started.
        CheckpointError: missing or damaged.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        pipeline_size: int,
        vocab_size: int | None = None,
        max_running: int = 8,
        dtype: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        opened = open_checkpoint(checkpoint)
        self._stages = decode_stages(opened.plan, pipeline_size)
        self._exits = tuple(exit_ for stage in self._stages for exit_ in stage.exits)
        self._max_running, self._timeout_s = max_running, timeout_s
        self._next = 0
        self._waiting: OrderedDict[int, tuple[Request, float]] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._queue: list[Message] = []
        self._arrived: list[tuple[int, Emission]] = []
        self._threads_before = torch.get_num_threads()
        threads = max(1, available_cores() // pipeline_size)
        job = StageJob(
            checkpoint=str(opened.folder),
            stage=0,
            num_stages=pipeline_size,
            vocab_size=vocab_size,
            dtype=dtype,
            threads=threads,
            timeout_s=timeout_s,
            driver=-1,
            previous=-1,
            following=None,
        )
        self._workers = _Workers(job)
        try:
            kind = None if dtype is None else getattr(torch, dtype)
            weights = stage_weights(opened, self._stages[0], vocab_size, kind)
            self._runner = StageRunner(Transformer(weights))
            self._weights = weights
            self._workers.wait_until_ready()
        except BaseException:
            self._workers.close()
            raise
        if pipeline_size > 1:
            torch.set_num_threads(threads)

    def submit(self, request: Request) -> int:
        """Take a sequence in; see ``requests.Engine``."""
        if request.options.mode not in PIPELINE_MODES:
            modes = " or ".join(PIPELINE_MODES)
            raise DecodeError(f"mode is '{request.options.mode}'; pipeline stages decode in mode {modes}")
        check_request(request, self._weights, self._exits)
        number = self._next
        self._next += 1
        self._waiting[number] = (request, time.perf_counter())
        return number

    def cancel(self, request: int) -> None:
        """Drop a sequence and free its keys and values; unknown and finished ones are ignored."""
        self._waiting.pop(request, None)
        if self._running.pop(request, None) is not None:
            self._queue = [message for message in self._queue if message.sequence != request]
            self._queue.append(Closing(request))
            self._run_first_stage()

    def step(self) -> list[TokenEvent]:
        """Start what can start on the first stage, and wait for at least one token if nothing can."""
        self._join()
        events = self._take(None if not self._queue and self._running else 0.0)
        if self._queue:
            self._run_first_stage()
            events += self._take(0.0)
        return events

    @property
    def running(self) -> int:
        """Sequences that hold keys and values."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and have not joined."""
        return len(self._waiting)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are allocated on the first stage now."""
        return self._runner.kv_bytes

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the stages after the first."""
        return self._workers.pids

    def close(self) -> None:
        """End all processes; safe to call twice."""
        self._waiting.clear()
        self._running.clear()
        self._workers.close()
        torch.set_num_threads(self._threads_before)

    def _join(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            number, (request, since_s) = self._waiting.popitem(last=False)
            options = request.options
            capacity = capacity_of(request, self._weights.run.training.seq_length)
            generator = torch.Generator().manual_seed(options.seed)
            self._running[number] = _Running(request, generator, capacity, since_s)
            in_use = options.policy.for_exits(self._exits) if options.mode == "pipeline" else ()
            depths = tuple((exit_.depth, threshold) for exit_, threshold in in_use)
            self._feed(number, request.prompt, Opening(options, capacity, depths))

    def _feed(self, number: int, tokens: tuple[int, ...], opening: Opening | None = None) -> None:
        sequence = self._running[number]
        options = sequence.request.options
        self._queue.append(
            Rows(
                sequence=number,
                tokens=tokens,
                position=sequence.length,
                is_wanted=True,
                may_leave=sequence.emitted >= options.policy.first_early_token,
                uniform=uniform_of(sequence.generator) if options.sampling.draws else 0.0,
                opening=opening,
            )
        )
        sequence.length += len(tokens)

    def _run_first_stage(self) -> None:
        queue, self._queue = self._queue, []
        onward = self._runner.run(queue, lambda number, emission: self._arrived.append((number, emission)))
        if onward:
            self._workers.send(onward)

    def _take(self, wait_s: float | None) -> list[TokenEvent]:
        """Events of the tokens that have arrived; with None, wait for the first one."""
        if not self._arrived:
            self._arrived += self._workers.receive(self._timeout_s if wait_s is None else wait_s)
            if not self._arrived and wait_s is None:
                self._workers.close()
                raise DecodeError(
                    f"no pipeline stage has answered for {self._timeout_s:g} s; they were ended"
                )
        arrived, self._arrived = self._arrived, []
        return [self._event(number, emission) for number, emission in arrived if number in self._running]

    def _event(self, number: int, emission: Emission) -> TokenEvent:
        sequence = self._running[number]
        now_s = time.perf_counter()
        latency_s, sequence.since_s = now_s - sequence.since_s, now_s
        sequence.emitted += 1
        finish: Finish | None = None
        if emission.token in sequence.request.end_tokens:
            finish = "stop"
        elif sequence.length >= sequence.capacity:
            finish = "length"
        if finish is None:
            self._feed(number, (emission.token,))
        else:
            del self._running[number]
            self._queue.append(Closing(number))
        return TokenEvent(number, None if finish == "stop" else emission, finish, latency_s)


class _Workers:
    """The processes of the stages after the first, and the connections to them.

    Args:
        job: of the first stage; the others' differ in their place.
    """

    def __init__(self, job: StageJob) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._drivers: list[Channel] = []
        self._second: Channel | None = None
        try:
            self._start(job)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def send(self, messages: list[Message]) -> None:
        """To the second stage."""
        if self._second is None:
            return
        try:
            self._second.send(messages)
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
        for channel in (*self._drivers, *([self._second] if self._second else [])):
            channel.close()
        self._drivers, self._second = [], None
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []

    def _start(self, job: StageJob) -> None:
        # One connection from each stage to the next, and one from each worker back to the driver.
        ahead = [socket.socketpair() for _ in range(job.num_stages - 1)]
        back = [socket.socketpair() for _ in range(job.num_stages - 1)]
        with contextlib.ExitStack() as stack:
            for pair in (*ahead, *back):
                stack.callback(pair[1].close)
            for sender, _ in ahead[1:]:
                stack.callback(sender.close)
            for index in range(job.num_stages - 1):
                following = ahead[index + 1][0] if index + 2 < job.num_stages else None
                inherited = [back[index][1], ahead[index][1], *([following] if following else [])]
                numbers = [one.fileno() for one in inherited]
                own = StageJob(
                    checkpoint=job.checkpoint,
                    stage=index + 1,
                    num_stages=job.num_stages,
                    vocab_size=job.vocab_size,
                    dtype=job.dtype,
                    threads=job.threads,
                    timeout_s=job.timeout_s,
                    driver=numbers[0],
                    previous=numbers[1],
                    following=numbers[2] if following else None,
                )
                command = [sys.executable, "-m", "eeplan.runtime.decode.stage_worker", own.to_json()]
                environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
                self._processes.append(
                    subprocess.Popen(command, env=environment, pass_fds=numbers, stdin=subprocess.DEVNULL)
                )
        self._drivers = [Channel(mine, job.timeout_s) for mine, _ in back]
        if ahead:
            self._second = Channel(ahead[0][0], job.timeout_s)

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
        self.close()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return DecodeError(
            f"pipeline stage {place + 2} (process {pid}) {how}; its sequences are lost, all stages were ended"
        )
