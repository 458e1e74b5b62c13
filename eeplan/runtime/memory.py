"""Live bytes over time, from the allocator itself.

On a GPU PyTorch keeps these statistics anyway. Its CPU allocator only reports to an attached profiler, which
slows ops down, so memory is measured in iterations of its own that are never timed.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.profiler import profile


@dataclass(slots=True)
class AllocationTrace:
    """Allocations (positive) and frees (negative) of one stretch of work, in time order."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(machine time in ns, bytes); empty on a GPU."""
    peak_bytes: int = 0
    """Largest live bytes beyond those at the start."""
    end_bytes: int = 0
    """Live bytes at the end beyond those at the start."""


@contextlib.contextmanager
def trace_allocations(device: torch.device) -> Iterator[AllocationTrace]:
    """Record what the enclosed work allocates; the trace is complete when the block ends."""
    trace = AllocationTrace()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield trace
        torch.cuda.synchronize()
        trace.peak_bytes = torch.cuda.max_memory_allocated() - start
        trace.end_bytes = torch.cuda.memory_allocated() - start
        return
    with profile(use_kineto=True, profile_memory=True) as profiler:
        yield trace
    events = profiler.kineto_results.events()
    # The profiler stamps events with the wall clock; spans use the monotonic one.
    shift = time.time_ns() - time.monotonic_ns()
    trace.changes = sorted((e.start_ns() - shift, e.nbytes()) for e in events if e.name() == "[memory]")
    live = 0
    for _, change in trace.changes:
        live += change
        trace.peak_bytes = max(trace.peak_bytes, live)
    trace.end_bytes = live


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; views and shared tensors count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def resident_bytes() -> int:
    """Resident bytes of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Largest resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
