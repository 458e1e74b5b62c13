"""The training loop of one rank: iterate, log, evaluate, measure, save."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from eeplan.plan import Plan, write_plan
from eeplan.runtime import checkpoint
from eeplan.runtime.backend import stop
from eeplan.runtime.batches import BatchStream, Microbatch, build_batches
from eeplan.runtime.dataset_files import check_data
from eeplan.runtime.executor import IterationRecord, MarkedSpan
from eeplan.runtime.memory import AllocationTrace, peak_resident_bytes, trace_allocations
from eeplan.runtime.recording import (
    MetricsWriter,
    StageMemory,
    StageTrace,
    stage_trace,
    write_measurements,
)
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.stage import FINAL, Batch, exit_name, loss_weights

WARM_UP_ITERATIONS = (1, 2)
"""Untimed: first touches of memory, lazily created optimizer state."""
MEMORY_ITERATION = 3
"""Allocations are traced in this iteration; tracing slows it, so it is untimed as well."""


@dataclass(slots=True)
class _Progress:
    """What the loop has seen so far."""

    traces: list[StageTrace] = field(default_factory=list)
    allocations: AllocationTrace = field(default_factory=AllocationTrace)
    state_bytes: int = 0
    process_peak_bytes: int = 0


def train(plan: Plan, out: Path) -> None:
    """Execute ``plan`` on this rank and leave a run folder in ``out``; collective over all ranks.

    Raises:
        DataError, ScheduleError, CheckpointError: see the modules that raise them.
    """
    started = time.monotonic()
    summary = check_data(plan.run)
    rank = set_up(plan)
    training = plan.run.training
    extra = rank.schedule.num_microbatches - plan.num_microbatches
    writer = None
    if rank.backend.rank == 0:
        write_plan(out / "plan.yaml", plan)
        samples = training.global_batch_size // plan.num_microbatches * rank.schedule.num_microbatches
        writer = MetricsWriter(
            out, sys.stderr, training.train_iters, training.global_batch_size, samples_per_iteration=samples
        )
        writer.reference(summary.unigram_entropy_nats)
    progress = _Progress()
    stream = build_batches(plan.run, rank_info=rank.backend, extra_microbatches=extra)
    _validate(rank, writer, 0)
    for iteration in range(1, training.train_iters + 1):
        _iterate(rank, stream, iteration, writer, progress)
    _validate(rank, writer, training.train_iters)
    checkpoint.save(out / "checkpoints", training.train_iters, rank.model, plan)
    write_measurements(
        out,
        rank.backend,
        progress.traces,
        StageMemory(
            peak_bytes=progress.state_bytes + progress.allocations.peak_bytes,
            process_peak_bytes=progress.process_peak_bytes,
            state_bytes=progress.state_bytes,
        ),
        message_bytes=plan.stages[0].output_bytes,
        untimed=[*WARM_UP_ITERATIONS, MEMORY_ITERATION],
        wall_s=time.monotonic() - started,
    )
    if writer is not None:
        writer.close()
    stop()


def _iterate(
    rank: Rank, stream: BatchStream, iteration: int, writer: MetricsWriter | None, progress: _Progress
) -> None:
    """One training iteration with its bookkeeping."""
    training = rank.plan.run.training
    is_memory_iteration = iteration == min(MEMORY_ITERATION, training.train_iters)
    if is_memory_iteration:
        progress.state_bytes = rank.training.state_bytes()
        progress.process_peak_bytes = peak_resident_bytes()
    tracing = (
        trace_allocations(rank.backend.device)
        if is_memory_iteration
        else contextlib.nullcontext(AllocationTrace())
    )
    with tracing as allocations:
        trace, values = _train_step(rank, stream, iteration)
    if is_memory_iteration:
        progress.allocations = allocations
        trace.memory = _live_bytes(allocations, progress.state_bytes)
    progress.traces.append(trace)
    if writer is not None:
        due = iteration % training.log_interval == 0 or iteration in (1, training.train_iters)
        writer.train(iteration, values, print_line=due)


def _train_step(rank: Rank, stream: BatchStream, iteration: int) -> tuple[StageTrace, dict[str, Any]]:
    """Forward and backward of all microbatches, gradient synchronisation, optimizer step, loss reduction."""
    clock = rank.clock
    clock.start()
    start = clock.mark()
    rank.training.zero_gradients()
    rank.computation.weights = loss_weights(rank.plan, iteration)
    record = rank.executor.run(lambda m: on_device(stream.read(m), rank.backend.device))
    stream.advance(rank.schedule.num_microbatches)
    computed = clock.mark()
    rank.training.synchronize_gradients()
    synchronised = clock.mark()
    step = rank.training.step()
    stepped = clock.mark()
    losses = _mean_losses(rank, record)
    end = clock.mark()
    extra = [
        MarkedSpan("grad_sync", -1, computed, synchronised),
        MarkedSpan("optimizer", -1, synchronised, stepped),
    ]
    trace = stage_trace(clock, iteration, (start, end), record, extra)
    seconds = (trace.end_ns - trace.start_ns) / 1e9
    training = rank.plan.run.training
    values = {
        "lr": step.learning_rate,
        "grad_norm": step.grad_norm,
        "losses": losses,
        "iteration_time_s": seconds,
        "tokens_per_s": training.global_batch_size * training.seq_length / seconds,
    }
    return trace, values


def _validate(rank: Rank, writer: MetricsWriter | None, iteration: int) -> None:
    """Mean loss of every head over the same validation microbatches each time; collective."""
    run = rank.plan.run
    if float(run.data.split.split(",")[1]) == 0:
        return
    stream = build_batches(run, rank_info=rank.backend, split="valid")
    record = IterationRecord()
    for index in range(len(stream)):
        record.losses.append(_evaluate_one(rank, index, next_batch(stream, rank.backend.device)))
    losses = _mean_losses(rank, record)
    if writer is not None:
        writer.validation(iteration, losses)


def next_batch(stream: BatchStream, device: torch.device) -> Batch:
    """The stream's next microbatch on the device."""
    return on_device(next(stream), device)


def on_device(microbatch: Microbatch, device: torch.device) -> Batch:
    """A microbatch where the model is."""
    return Batch(
        tokens=microbatch["tokens"].to(device),
        labels=microbatch["labels"].to(device),
        loss_mask=microbatch["loss_mask"].to(device),
        position_ids=microbatch["position_ids"].to(device),
    )


def _evaluate_one(rank: Rank, index: int, batch: Batch) -> dict[str, Tensor]:
    channels = rank.channels
    received = None
    if channels.previous_rank is not None:
        received = torch.empty(channels.message_shape, dtype=channels.dtype, device=channels.device)
        dist.recv(received, src=channels.previous_rank, group=channels.forward_group, tag=index)
    output, losses = rank.computation.evaluate(received, batch)
    if output is not None:
        dist.send(output.contiguous(), dst=channels.next_rank, group=channels.forward_group, tag=index)
    return losses


def _mean_losses(rank: Rank, record: IterationRecord) -> dict[str, float]:
    """Mean loss of every head on every rank: sums over stages, means over microbatches and replicas."""
    names = [exit_name(exit_.depth) for exit_ in rank.plan.exits] + [FINAL]
    sums = torch.zeros(len(names), dtype=torch.float64, device=rank.backend.device)
    for losses in record.losses:
        for name, loss in losses.items():
            sums[names.index(name)] += loss.double()
    sums /= max(1, len(record.losses))
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, (sums / rank.backend.data_size).tolist(), strict=True))


def _live_bytes(allocations: AllocationTrace, state_bytes: int) -> list[tuple[int, int]]:
    """Live bytes over time, thinned to the steps that matter for a picture."""
    live, samples = state_bytes, list[tuple[int, int]]()
    smallest_step = max(1, allocations.peak_bytes // 400)
    for time_ns, change in allocations.changes:
        live += change
        if not samples or abs(live - samples[-1][1]) >= smallest_step:
            samples.append((time_ns, live))
    return samples
