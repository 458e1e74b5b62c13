"""Latency and bandwidth between two processes, for messages and for reductions.

Both are fitted as ``latency + bytes / bandwidth`` through the medians at several sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from eeplan.profile import Transfer
from eeplan.runtime.backend import Backend
from eeplan.spec import RunSpec

ROUNDS = 15


def message_bytes(run: RunSpec) -> int:
    """Size of the hidden states that a rank sends to the next stage for one microbatch."""
    training, parallel = run.training, run.parallel
    whole = training.micro_batch_size * training.seq_length * run.model.hidden_size * training.element_bytes
    return whole // parallel.tensor_model_parallel_size if parallel.sequence_parallel else whole


def measure_p2p(run: RunSpec, backend: Backend) -> Transfer:
    """One-way message cost between ranks 0 and 1, from round trips around the run's message size.

    Collective over all ranks; every rank returns the fit, only that of rank 0 was measured there.
    """
    forward, backward = dist.new_group(), dist.new_group()
    sizes = _sizes_around(message_bytes(run))

    def round_trip(tensor: torch.Tensor) -> None:
        if backend.rank == 0:
            dist.send(tensor, dst=1, group=forward)
            dist.recv(tensor, src=1, group=backward)
        elif backend.rank == 1:
            dist.recv(tensor, src=0, group=forward)
            dist.send(tensor, dst=0, group=backward)

    return _fit(sizes, [s / 2 for s in _median_seconds(round_trip, sizes, backend)])


def measure_all_reduce(run: RunSpec, backend: Backend) -> Transfer:
    """All-reduce between ranks 0 and 1 around the size of a vocabulary matrix's fp32 gradient."""
    pair = dist.new_group([0, 1])
    sizes = _sizes_around(run.padded_vocab_size * run.model.hidden_size * 4)

    def reduce(tensor: torch.Tensor) -> None:
        if backend.rank < 2:
            dist.all_reduce(tensor, group=pair)

    return _fit(sizes, _median_seconds(reduce, sizes, backend))


def _sizes_around(size_bytes: int) -> list[int]:
    return [1024, *sorted({max(2048, size_bytes // 4), max(4096, size_bytes), max(8192, 2 * size_bytes)})]


def _median_seconds(
    action: Callable[[torch.Tensor], None], sizes: list[int], backend: Backend
) -> list[float]:
    medians = []
    for size in sizes:
        tensor = torch.zeros(size // 4, dtype=torch.float32, device=backend.device)
        seconds = []
        for _ in range(ROUNDS + 3):
            if backend.is_cuda:
                torch.cuda.synchronize()
            dist.barrier()
            start = time.monotonic()
            action(tensor)
            if backend.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - start)
        medians.append(statistics.median(seconds[3:]))
    return medians


def _fit(sizes: list[int], seconds: list[float]) -> Transfer:
    """Least squares on relative errors, so that small and large sizes count alike."""
    x, y = np.array(sizes, dtype=float), np.array(seconds)
    design = np.stack([1 / y, x / y], axis=1)
    latency_s, per_byte_s = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0]
    latency_s = max(0.0, float(latency_s))
    per_byte_s = max(float(per_byte_s), 1e-15)
    return Transfer(
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / per_byte_s,
        points=tuple(zip(sizes, seconds, strict=True)),
    )
