"""Pipeline decoding over P processes (EE-LLM 4): a token that leaves returns to the first stage at once, and
the next one starts there while the later stages complete the old one's keys and values.

The process that makes the engine runs the first stage itself, so a token that leaves there takes no detour;
the others are started by it, read their part of the checkpoint, and are gone when it is. Rows travel from
stage to stage, tokens from wherever they are decided straight back (``stage_rows``). Sequences that are under
way at the same time fill the stages together.

With one stage nothing is started, and every token runs through all layers, whatever exit it is emitted at.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eeplan.errors import DecodeError
from eeplan.runtime.decode.admission import Admission
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import capacity_of, check_request
from eeplan.runtime.decode.modes import Mode
from eeplan.runtime.decode.network import Transformer
from eeplan.runtime.decode.requests import Finish, Request, TokenEvent
from eeplan.runtime.decode.sampling import uniform_of
from eeplan.runtime.decode.stage_processes import StageProcesses
from eeplan.runtime.decode.stage_rows import Closing, Message, Opening, Rows, StageRunner
from eeplan.runtime.decode.stage_worker import StageJob
from eeplan.runtime.decode.stages import decode_stages, open_checkpoint, stage_weights
from eeplan.runtime.decode.team import Team, check_team
from eeplan.runtime.launch import available_cores
from eeplan.runtime.model import ExitSpec

PIPELINE_MODES: tuple[Mode, ...] = ("pipeline", "full")


@dataclass(slots=True)
class _Running:
    request: Request
    generator: torch.Generator
    capacity: int
    since_s: float
    length: int = 0
    """Tokens fed so far."""
    emitted: int = 0


class LaterStages(Protocol):
    """What lies behind the first stage."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by stage."""
        ...

    def send(self, messages: list[Message]) -> None:
        """To the second stage."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """Around the first stage's own work: errors end the others, a lost connection is explained."""
        ...

    def receive(self, wait_s: float) -> list[tuple[int, Emission]]:
        """Sequences and their tokens that have come in; waits so long for the first."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class NoLaterStages:
    """Behind the only stage there is nothing."""

    pids: tuple[int, ...] = ()

    def send(self, messages: list[Message]) -> None:
        """What goes on from the only stage is that sequences are done."""

    def explained(self) -> AbstractContextManager[None]:
        """Nobody else can fail."""
        return nullcontext()

    def receive(self, wait_s: float) -> list[tuple[int, Emission]]:
        """No tokens but the first stage's own."""
        return []

    def close(self) -> None:
        """Nothing to end."""


class PipelineDriver:
    """What the process of the first stage does: hands out rows, takes tokens in, decides who is done.

    Args:
        first: the first stage.
        later: the stages behind it.
        exits: of all stages, by depth.
        max_running: sequences that decode at once; others wait.
        timeout_s: how long the later stages may keep silent while tokens are due.
        threads: compute threads of this process until :meth:`close`; None leaves them.
    """

    def __init__(
        self,
        first: Transformer,
        later: LaterStages,
        exits: tuple[ExitSpec, ...],
        *,
        max_running: int = 8,
        timeout_s: float = 60.0,
        threads: int | None = None,
    ) -> None:
        self._runner, self._later, self._exits = StageRunner(first), later, exits
        self._weights = first.weights
        self._timeout_s = timeout_s
        self._sequences: Admission[_Running] = Admission(max_running)
        self._queue: list[Message] = []
        self._arrived: list[tuple[int, Emission]] = []
        self._threads_before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)

    def submit(self, request: Request) -> int:
        """Take a sequence in; see ``requests.Engine``."""
        if request.options.mode not in PIPELINE_MODES:
            modes = " or ".join(PIPELINE_MODES)
            raise DecodeError(f"mode is '{request.options.mode}'; pipeline stages decode in mode {modes}")
        check_request(request, self._weights, self._exits)
        return self._sequences.submit(request)

    def cancel(self, request: int) -> None:
        """Drop a sequence and free its keys and values; unknown and finished ones are ignored."""
        if self._sequences.drop(request):
            self._queue = [message for message in self._queue if message.sequence != request]
            self._queue.append(Closing(request))
            self._run_first_stage()

    def step(self) -> list[TokenEvent]:
        """Start what can start on the first stage, and wait for at least one token if nothing can."""
        self._sequences.admit(self._join)
        events = self._take(None if not self._queue and self._sequences.running else 0.0)
        if self._queue:
            self._run_first_stage()
            events += self._take(0.0)
        return events

    @property
    def running(self) -> int:
        """Sequences that hold keys and values."""
        return len(self._sequences.running)

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and have not joined."""
        return self._sequences.waiting

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are allocated on the first stage now."""
        return self._runner.kv_bytes

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the stages after the first."""
        return self._later.pids

    def close(self) -> None:
        """End all processes; safe to call twice."""
        self._sequences.clear()
        self._later.close()
        torch.set_num_threads(self._threads_before)

    def _join(self, number: int, request: Request, since_s: float) -> _Running:
        options = request.options
        capacity = capacity_of(request, self._weights.run.training.seq_length)
        sequence = _Running(request, torch.Generator().manual_seed(options.seed), capacity, since_s)
        in_use = options.policy.for_exits(self._exits) if options.mode == "pipeline" else ()
        depths = tuple((exit_.depth, threshold) for exit_, threshold in in_use)
        self._feed(number, sequence, request.prompt, Opening(options, capacity, depths))
        return sequence

    def _feed(
        self, number: int, sequence: _Running, tokens: tuple[int, ...], opening: Opening | None = None
    ) -> None:
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
        with self._later.explained():
            onward = self._runner.run(
                queue, lambda number, emission: self._arrived.append((number, emission))
            )
        if onward:
            self._later.send(onward)

    def _take(self, wait_s: float | None) -> list[TokenEvent]:
        """Events of the tokens that have arrived; with None, wait for the first one."""
        if not self._arrived:
            self._arrived += self._later.receive(self._timeout_s if wait_s is None else wait_s)
            if not self._arrived and wait_s is None:
                self._later.close()
                raise DecodeError(
                    f"no pipeline stage has answered for {self._timeout_s:g} s; they were ended"
                )
        arrived, self._arrived = self._arrived, []
        return [
            self._event(number, emission) for number, emission in arrived if number in self._sequences.running
        ]

    def _event(self, number: int, emission: Emission) -> TokenEvent:
        sequence = self._sequences.running[number]
        now_s = time.perf_counter()
        latency_s, sequence.since_s = now_s - sequence.since_s, now_s
        sequence.emitted += 1
        finish: Finish | None = None
        if emission.token in sequence.request.end_tokens:
            finish = "stop"
        elif sequence.length >= sequence.capacity:
            finish = "length"
        if finish is None:
            self._feed(number, sequence, (emission.token,))
        else:
            self._sequences.drop(number)
            self._queue.append(Closing(number))
        return TokenEvent(number, None if finish == "stop" else emission, finish, latency_s)


class PipelineEngine(PipelineDriver):
    """Engine of P pipeline stages, each in a process of its own. Modes ``pipeline`` and ``full``.

    Args:
        checkpoint: a checkpoint folder of any layout, or a run's folder.
        pipeline_size: P, the number of stages.
        tensor_size: processes that share each stage.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
        max_running: sequences that decode at once; others wait.
        dtype: name of the torch dtype to compute in; default, as stored.
        timeout_s: how long a stage that has work may keep silent before the engine gives up.

    Raises:
        DecodeError: there are fewer layers than stages, heads or channels cannot be shared so, or a stage
            could not be started.
        CheckpointError: missing or damaged.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        pipeline_size: int,
        tensor_size: int = 1,
        vocab_size: int | None = None,
        max_running: int = 8,
        dtype: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        opened = open_checkpoint(checkpoint)
        stages = decode_stages(opened.plan, pipeline_size)
        check_team(opened.plan.run, tensor_size)
        threads = max(1, available_cores() // (pipeline_size * tensor_size))
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
            tensor_size=tensor_size,
        )
        later = StageProcesses(job)
        try:
            team = Team(0, tensor_size, later.team)
            first = Transformer(stage_weights(opened, stages[0], vocab_size, dtype, team))
            later.wait_until_ready()
        except BaseException:
            later.close()
            raise
        super().__init__(
            first,
            later,
            tuple(exit_ for stage in stages for exit_ in stage.exits),
            max_running=max_running,
            timeout_s=timeout_s,
            # Alone, the first stage has all cores anyway.
            threads=threads if later.pids else None,
        )
