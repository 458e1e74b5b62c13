"""The training loop of one rank: iterate, log, evaluate, measure, save, go on from what was saved."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eeplan.errors import Preempted
from eeplan.plan import Plan, write_plan
from eeplan.runtime import checkpoint, resume
from eeplan.runtime.backend import stop
from eeplan.runtime.background_save import BackgroundSaver
from eeplan.runtime.batches import BatchStream, build_batches
from eeplan.runtime.dataset_files import check_data
from eeplan.runtime.evaluation import (
    PART_NAMES,
    Evaluator,
    evaluators,
    head_names,
    mean_losses,
    on_device,
    write_quality,
)
from eeplan.runtime.executor import IterationRecord, MarkedSpan
from eeplan.runtime.exit_timing import ExitTimer, mean_seconds
from eeplan.runtime.guard import Guard
from eeplan.runtime.memory import AllocationTrace, peak_resident_bytes, trace_allocations
from eeplan.runtime.recording import (
    MetricsWriter,
    StageMemory,
    StageTrace,
    stage_trace,
    write_measurements,
)
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.stage import Batch
from eeplan.runtime.wandb_log import WandbLog

WARM_UP_ITERATIONS = 2
"""Untimed after a start: first touches of memory, lazily created optimizer state. In the iteration after them
allocations are traced; tracing slows it, so it is untimed as well."""


@dataclass(slots=True)
class _Progress:
    """What the loop has seen since it was started."""

    done: int = 0
    """Iterations done before."""
    traces: list[StageTrace] = field(default_factory=list)
    allocations: AllocationTrace = field(default_factory=AllocationTrace)
    state_bytes: int = 0
    process_peak_bytes: int = 0


def train(
    plan: Plan,
    out: Path,
    *,
    restart: bool = False,
    stop_is_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Execute ``plan`` on this rank and leave a run folder in ``out``; collective over all ranks.

    Where ``out`` holds checkpoints of the plan, training goes on from the newest valid one.

    Args:
        restart: begin anew instead, and remove what an earlier run left.
        stop_is_requested: asked every iteration; when true on any rank, all save and end.

    Raises:
        DataError, ScheduleError, CheckpointError, TrainingError: see the modules that raise them.
        Preempted: saved and ended on request.
    """
    started = time.monotonic()
    summaries = check_data(plan.run)
    rank = set_up(plan)
    training = plan.run.training
    extra = rank.schedule.num_microbatches - plan.num_microbatches
    stream = build_batches(plan.run, rank_info=rank.backend, extra_microbatches=extra)
    progress = _Progress(done=_go_on(rank, stream, out, restart))
    if progress.done >= training.train_iters:
        _say(rank, f"all {training.train_iters} iterations are done; nothing is left to train")
        stop()
        return
    writer = None
    if rank.backend.rank == 0:
        write_plan(out / "plan.yaml", plan)
        samples = training.global_batch_size // plan.num_microbatches * rank.schedule.num_microbatches
        writer = MetricsWriter(
            out,
            sys.stderr,
            training.train_iters,
            training.global_batch_size,
            samples_per_iteration=samples,
            after_iteration=progress.done or None,
            wandb=WandbLog(training.wandb_project, plan, out) if training.wandb_project else None,
        )
        if not progress.done:
            # Of a model that knows which dataset a text is from, and the frequencies of words there.
            shares = [one.weight for one in plan.run.data.datasets]
            entropies = [summary.unigram_entropy_nats for summary in summaries]
            writer.reference(sum(a * b for a, b in zip(shares, entropies, strict=True)))
    parts = evaluators(rank)
    if not progress.done:
        _evaluate(rank, parts.get("valid"), writer, 0, out)
    rank.computation.exit_timer = ExitTimer(rank.clock)
    guard = Guard(stop_is_requested)
    saver = BackgroundSaver() if training.async_save else None
    for iteration in range(progress.done + 1, training.train_iters + 1):
        _iterate(rank, stream, iteration, writer, progress, guard)
        if iteration < training.train_iters:
            if training.eval_interval is not None and iteration % training.eval_interval == 0:
                # Before saving, so that whoever goes on from there need not evaluate again.
                _evaluate(rank, parts.get("valid"), writer, iteration, out)
            _save_if_due(rank, stream, iteration, out, saver, guard.stops)
    _evaluate(rank, parts.get("valid"), writer, training.train_iters, out)
    _evaluate(rank, parts.get("test"), writer, training.train_iters, out)
    # Measurements first: who finds the last checkpoint finds them too.
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
        untimed=range(progress.done + 1, progress.done + WARM_UP_ITERATIONS + 2),
        wall_s=time.monotonic() - started,
    )
    if writer is not None:
        writer.close()
    _save(rank, stream, training.train_iters, out, saver, waits=True)
    stop()


def _go_on(rank: Rank, stream: BatchStream, out: Path, restart: bool) -> int:
    """Restore the newest valid checkpoint in ``out``, if any; iterations done. Collective."""
    if restart and rank.backend.rank == 0:
        resume.start_over(out)
    found = resume.find_together(out / "checkpoints", rank.plan)
    if found is None:
        return 0
    for note in [*found.notes, *resume.restore(rank, stream, found)]:
        _say(rank, note)
    return found.position.iteration


def _save_if_due(
    rank: Rank, stream: BatchStream, iteration: int, out: Path, saver: BackgroundSaver | None, stops: bool
) -> None:
    interval = rank.plan.run.training.save_interval
    if saver is not None:
        saver.check()
    if stops or (interval is not None and iteration % interval == 0):
        _save(rank, stream, iteration, out, saver, waits=stops)
    if stops:
        _say(rank, f"stopped on request after iteration {iteration}, which is saved")
        stop()
        raise Preempted(f"training was stopped after iteration {iteration}; the same command goes on")


def _save(
    rank: Rank,
    stream: BatchStream,
    iteration: int,
    out: Path,
    saver: BackgroundSaver | None = None,
    *,
    waits: bool = False,
) -> None:
    """Save now, or from a copy by ``saver`` meanwhile; ``waits`` until it is done. Collective."""
    taken = checkpoint.snapshot(
        iteration,
        rank.model,
        rank.plan,
        training=rank.training,
        position=resume.position_of(rank, stream, iteration),
        backend=rank.backend,
        copies=saver is not None and not waits,
    )
    if saver is None:
        checkpoint.write(out / "checkpoints", taken)
        return
    saver.save(out / "checkpoints", taken)
    if waits:
        saver.wait()


def _say(rank: Rank, text: str) -> None:
    if rank.backend.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _iterate(
    rank: Rank,
    stream: BatchStream,
    iteration: int,
    writer: MetricsWriter | None,
    progress: _Progress,
    guard: Guard,
) -> None:
    """One training iteration with its bookkeeping."""
    training = rank.plan.run.training
    is_memory_iteration = iteration == min(progress.done + WARM_UP_ITERATIONS + 1, training.train_iters)
    if is_memory_iteration:
        progress.state_bytes = rank.training.state_bytes()
        progress.process_peak_bytes = peak_resident_bytes()
    tracing = (
        trace_allocations(rank.backend.device)
        if is_memory_iteration
        else contextlib.nullcontext(AllocationTrace())
    )
    with tracing as allocations:
        trace, values = _train_step(rank, stream, iteration, guard)
    if is_memory_iteration:
        progress.allocations = allocations
        trace.memory = _live_bytes(allocations, progress.state_bytes)
    progress.traces.append(trace)
    if writer is not None:
        due = iteration % training.log_interval == 0 or iteration in (1, training.train_iters)
        writer.train(iteration, values, print_line=due)


def _train_step(
    rank: Rank, stream: BatchStream, iteration: int, guard: Guard | None = None
) -> tuple[StageTrace, dict[str, Any]]:
    """Forward and backward of all microbatches, gradient synchronisation, optimizer step, loss reduction."""
    clock = rank.clock
    clock.start()
    start = clock.mark()
    rank.begin_iteration(iteration)
    record = rank.executor.run(lambda m: on_device(stream.read(m), rank.backend.device))
    stream.advance(rank.schedule.num_microbatches)
    computed = clock.mark()
    (guard or Guard()).check(iteration, record, rank.training, head_names(rank.plan))
    rank.training.synchronize_gradients()
    synchronised = clock.mark()
    loss_scale = rank.training.loss_scale
    step = rank.training.step()
    stepped = clock.mark()
    losses = _mean_losses(rank, record)
    end = clock.mark()
    extra = [
        MarkedSpan("grad_sync", -1, computed, synchronised),
        MarkedSpan("optimizer", -1, synchronised, stepped),
    ]
    trace = stage_trace(clock, iteration, (start, end), record, extra)
    if rank.computation.exit_timer is not None:
        trace.exits = mean_seconds(clock, rank.computation.exit_timer.take())
    seconds = (trace.end_ns - trace.start_ns) / 1e9
    training = rank.plan.run.training
    values = {
        "lr": step.learning_rate,
        "grad_norm": step.grad_norm,
        "losses": losses,
        "iteration_time_s": seconds,
        "tokens_per_s": training.global_batch_size * training.seq_length / seconds,
    }
    if rank.training.scales_losses:
        values |= {"loss_scale": loss_scale, "skipped": step.is_skipped}
    return trace, values


def _evaluate(
    rank: Rank, evaluator: Evaluator | None, writer: MetricsWriter | None, iteration: int, out: Path
) -> None:
    """Judge every head on held-out text, log it, and leave it in the run folder; collective."""
    if evaluator is None:
        return
    evaluated = evaluator.run(iteration)
    if writer is not None:
        quality = write_quality(out, rank.plan, evaluated) if evaluated.part == "valid" else None
        writer.evaluation(PART_NAMES[evaluated.part], iteration, evaluated.losses, quality)


def next_batch(stream: BatchStream, device: torch.device) -> Batch:
    """The stream's next microbatch on the device."""
    return on_device(next(stream), device)


def _mean_losses(rank: Rank, record: IterationRecord) -> dict[str, float]:
    """Mean loss of every head over the iteration's microbatches, on every rank."""
    by_name: dict[str, list[Tensor]] = {}
    for losses in record.losses:
        for name, loss in losses.items():
            by_name.setdefault(name, []).append(loss)
    return mean_losses(rank, by_name)


def _live_bytes(allocations: AllocationTrace, state_bytes: int) -> list[tuple[int, int]]:
    """Live bytes over time, thinned to the steps that matter for a picture."""
    live, samples = state_bytes, list[tuple[int, int]]()
    smallest_step = max(1, allocations.peak_bytes // 400)
    for time_ns, change in allocations.changes:
        live += change
        if not samples or abs(live - samples[-1][1]) >= smallest_step:
            samples.append((time_ns, live))
    return samples
