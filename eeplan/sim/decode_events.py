"""Event simulation of decoding one sequence, token by token and layer by layer.

Given where each token leaves, it plays what the decoder does: which rows run through which layer, which heads
are checked, when the token is emitted, what every pipeline stage is busy with. Nothing is expected or
averaged, so it is the judge of ``inference`` and ``decode_pipeline``, and it predicts a recorded generation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eeplan.sim.decode_process import DecodeProcess
from eeplan.spec import DecodeMode


@dataclass(frozen=True, slots=True)
class DecodeTrace:
    """What decoding a sequence took. Time starts with the first token's step; the prompt is not counted."""

    emitted_ns: tuple[int, ...]
    """When each token is there: in the pipeline at its exit, on one process at the end of its step."""
    done_ns: int
    """When all work is done, later stages included."""
    computed: NDArray[np.int32]
    """[tokens, layers]: how often each layer ran on each token."""
    checks: int
    """Early heads run, each counted once per row."""

    @property
    def ns_per_token(self) -> float:
        """Until all work is done, on average."""
        return self.done_ns / len(self.emitted_ns)


def simulate_decode(
    process: DecodeProcess, mode: DecodeMode, depths: Sequence[int], recompute_limit: int = 0
) -> DecodeTrace:
    """Decode a sequence in which token t leaves at ``depths[t]``.

    Args:
        process: built for ``mode``.
        depths: each an exit's depth, or the number of layers.
        recompute_limit: most tokens that may wait, in ``kv_recompute`` and ``catch_up``.
    """
    unknown = set(depths) - set(process.depths)
    assert not unknown, f"tokens leave at {sorted(unknown)}, exits are at {process.depths}"
    if mode == "pipeline":
        return _Pipeline(process, depths).run()
    return _OneProcess(process, depths).run(mode, recompute_limit)


class _OneProcess:
    """The whole model in one process: one forward after the other."""

    def __init__(self, process: DecodeProcess, depths: Sequence[int]) -> None:
        self.process, self.depths = process, depths
        self.heads_at = {exit_.depth: exit_.head for exit_ in process.exits}
        self.computed = np.zeros((len(depths), process.num_layers), dtype=np.int32)
        self.now_ns = 0
        self.checks = 0

    def run(self, mode: DecodeMode, limit: int) -> DecodeTrace:
        """Play every token."""
        emitted = []
        waiting: list[tuple[int, int]] = []
        for token, depth in enumerate(self.depths):
            self.now_ns += self.process.step_overhead_ns
            if mode == "full":
                self._all_layers(token)
            else:
                kept = mode == "catch_up"
                rows = [(one, reached if kept else 0) for one, reached in waiting]
                waiting = self._step(token, depth, rows, forced=len(waiting) >= limit)
            emitted.append(self.now_ns)
        return DecodeTrace(tuple(emitted), self.now_ns, self.computed, self.checks)

    def _all_layers(self, token: int) -> None:
        """Without early exits, no head but the final one runs."""
        self.now_ns += self.process.embedding.at(1)
        for layer in range(self.process.num_layers):
            self._run_layer(layer, [token])
        self.now_ns += self.process.final_head.at(1)

    def _step(
        self, token: int, depth: int, waiting: list[tuple[int, int]], forced: bool
    ) -> list[tuple[int, int]]:
        """One forward with waiting (token, layers done) pairs; those that still wait afterwards."""
        process = self.process
        done = {**dict(waiting), token: 0}
        self.now_ns += process.embedding.at(sum(reached == 0 for reached in done.values()))
        stop = process.num_layers if forced else depth
        for layer in range(stop):
            rows = [one for one, reached in done.items() if reached == layer]
            self._run_layer(layer, rows)
            for one in rows:
                done[one] = layer + 1
            head = self.heads_at.get(layer + 1)
            if head == "block":
                self._check(layer + 1, len(rows))
            elif head is not None and layer + 1 <= depth:
                self._check(layer + 1, 1)
        if depth == process.num_layers:
            self.now_ns += process.final_head.at(1)
        return [(one, reached) for one, reached in done.items() if reached < process.num_layers]

    def _run_layer(self, layer: int, rows: Sequence[int]) -> None:
        self.now_ns += self.process.layer.at(len(rows))
        self.computed[list(rows), layer] += 1

    def _check(self, depth: int, rows: int) -> None:
        self.now_ns += self.process.heads[self.heads_at[depth]].at(rows)
        self.checks += rows


Kind = Literal["arrive", "finish", "return"]


@dataclass(slots=True)
class _Stage:
    """One stage's queue of tokens whose hidden states have arrived."""

    queue: deque[int] = field(default_factory=deque)
    is_busy: bool = False


class _Pipeline:
    """One process per stage; tokens pass first in, first out, and start when the one before is emitted."""

    def __init__(self, process: DecodeProcess, depths: Sequence[int]) -> None:
        self.process, self.depths = process, depths
        self.stages = [_Stage() for _ in process.layers_per_stage]
        self.computed = np.zeros((len(depths), process.num_layers), dtype=np.int32)
        self.emitted: list[int] = []
        self.checks = 0
        self.events: list[tuple[int, int, Kind, int, int]] = []
        """(time, sequence number, kind, token, stage): a total order."""
        self.scheduled = 0
        self.now_ns = 0

    def run(self) -> DecodeTrace:
        """Play events until all stages are done with all tokens."""
        self._schedule(0, "arrive", token=0, stage=0)
        while self.events:
            self.now_ns, _, kind, token, stage = heapq.heappop(self.events)
            if kind == "finish":
                self.stages[stage].is_busy = False
                if stage + 1 < len(self.stages):
                    self._schedule(self.process.message_ns, "arrive", token, stage + 1)
            else:
                self.stages[stage].queue.append(token)
            self._start(stage)
        return DecodeTrace(tuple(self.emitted), self.now_ns, self.computed, self.checks)

    def _schedule(self, delay_ns: int, kind: Kind, token: int, stage: int) -> None:
        self.scheduled += 1
        heapq.heappush(self.events, (self.now_ns + delay_ns, self.scheduled, kind, token, stage))

    def _start(self, stage: int) -> None:
        """Begin with the next token in the queue, if the stage is free."""
        here = self.stages[stage]
        if here.is_busy or not here.queue:
            return
        here.is_busy = True
        token = here.queue.popleft()
        spent_ns = 0
        for cost_ns, emits in self._work(token, stage):
            spent_ns += cost_ns
            if emits:
                self.emitted.append(self.now_ns + spent_ns)
                if token + 1 < len(self.depths):
                    back_ns = self.process.return_ns if stage > 0 else 0
                    self._schedule(spent_ns + back_ns, "return", token + 1, 0)
        self._schedule(spent_ns, "finish", token, stage)

    def _work(self, token: int, stage: int) -> Iterator[tuple[int, bool]]:
        """What a stage does for a token, in order: nanoseconds, and whether it emits the token."""
        process, depth = self.process, self.depths[token]
        first = sum(process.layers_per_stage[:stage])
        yield process.step_overhead_ns, False
        if stage == 0:
            yield process.embedding.at(1), False
        for reached in range(first, first + process.layers_per_stage[stage] + 1):
            if reached > first:
                self.computed[token, reached - 1] += 1
                yield process.layer.at(1), False
            for exit_ in process.exits:
                if (exit_.depth, exit_.stage) != (reached, stage):
                    continue
                if exit_.head == "block" or reached <= depth:
                    self.checks += 1
                    yield process.heads[exit_.head].at(1), reached == depth
        if stage == len(self.stages) - 1 and depth == process.num_layers:
            yield process.final_head.at(1), True
