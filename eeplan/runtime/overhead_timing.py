"""Time per microbatch that a stage spends between ops: fetching text, posting messages, bookkeeping.

Two ranks execute a real schedule with real batches and messages, but every op only keeps its core busy for a
fixed time. Between the first two forwards of stage 0 nothing is waited for, so the gap there is the overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from eeplan.errors import DataError
from eeplan.runtime.backend import Backend
from eeplan.runtime.clock import Clock
from eeplan.runtime.executor import Channels, Executor
from eeplan.runtime.precision import dtype_of
from eeplan.runtime.stage import Batch
from eeplan.sim.schedule import one_f_one_b
from eeplan.spec import RunSpec

ROUNDS, MICROBATCHES, OP_SECONDS = 9, 4, 0.004


class BusyStage:
    """A computation that takes ``OP_SECONDS`` of its core and passes tensors of the right shape on."""

    def __init__(self, channels: Channels, *, is_first: bool) -> None:
        self.tensor = torch.zeros(channels.message_shape, dtype=channels.dtype, device=channels.device)
        self.is_first = is_first

    def forward(self, microbatch: int, received: Tensor | None, batch: Batch) -> Tensor | None:
        """Hidden states on stage 0, nothing on stage 1."""
        _spin()
        return self.tensor if self.is_first else None

    def backward(self, microbatch: int, gradient: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """A gradient on stage 1, nothing on stage 0."""
        _spin()
        return None if self.is_first else self.tensor, {}


def measure_overhead(run: RunSpec, backend: Backend, next_batch: Callable[[], Batch]) -> float:
    """Median seconds between two forwards that wait for nothing; collective over all ranks.

    Args:
        next_batch: fetches a microbatch as training does.
    """
    training, stage = run.training, backend.rank
    shares = run.parallel.tensor_model_parallel_size if run.parallel.sequence_parallel else 1
    channels = Channels(
        forward_group=dist.new_group([0, 1]),
        backward_group=dist.new_group([0, 1]),
        previous_rank=0 if stage == 1 else None,
        next_rank=1 if stage == 0 else None,
        message_shape=(training.seq_length // shares, training.micro_batch_size, run.model.hidden_size),
        dtype=dtype_of(training.precision),
        device=backend.device,
    )
    gaps: list[int] = []
    if stage < 2:
        clock = Clock(backend.device)
        computation = BusyStage(channels, is_first=stage == 0)
        executor = Executor(one_f_one_b(2, MICROBATCHES), stage, computation, channels, clock)
        for _ in range(ROUNDS):
            clock.start()
            first, second = executor.run(lambda _: next_batch()).spans[:2]
            end_ns, start_ns = clock.resolve([first.end, second.start])
            gaps.append(start_ns - end_ns)
    dist.barrier()
    return max(0.0, statistics.median(gaps) / 1e9) if gaps else 0.0


def batch_source(run: RunSpec, backend: Backend) -> Callable[[], Batch] | None:
    """Fetches of the run's own data, over and over; None when there is no data yet. Collective."""
    from eeplan.runtime.batches import RankInfo, build_batches
    from eeplan.runtime.loop import next_batch

    try:
        stream = build_batches(run, rank_info=RankInfo(0, run.parallel.data_parallel_size))
    except DataError:
        return None

    def fetch() -> Batch:
        if not len(stream):
            stream.seek(0)
        return next_batch(stream, backend.device)

    return fetch


def _spin() -> None:
    end = time.perf_counter() + OP_SECONDS
    while time.perf_counter() < end:
        continue
