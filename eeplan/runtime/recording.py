"""What a training run leaves behind: metrics, measured timelines, peak bytes (see docs of the run folder).

Only rank 0 writes; the other ranks hand their spans over at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from eeplan.errors import FileError
from eeplan.files import write_text
from eeplan.runtime.backend import Backend, software
from eeplan.runtime.clock import Clock
from eeplan.runtime.executor import IterationRecord, MarkedSpan
from eeplan.runtime.exit_timing import ExitSeconds, median_seconds
from eeplan.runtime.wandb_log import WandbLog
from eeplan.timeline import Direction, MemorySample, Message, Span, SpanKind, Timeline

MAX_TIMELINES = 12
"""Measured timelines kept in the run folder: those of the iterations closest to the median time."""


@dataclass(slots=True)
class StageTrace:
    """One stage's part of one iteration in machine time."""

    iteration: int
    start_ns: int
    end_ns: int
    spans: list[tuple[SpanKind, int, int, int]]
    """(kind, microbatch, start_ns, end_ns)"""
    sends: list[tuple[Direction, int, int]]
    """(direction, microbatch, ns)"""
    receives: list[tuple[Direction, int, int]]
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(ns, live bytes)"""
    core_share: float | None = None
    """Share of the ops' time during which the stage had a core; None where one thread does not do it all."""
    exits: ExitSeconds = field(default_factory=dict)
    """Mean seconds of each exit of the stage for one microbatch."""

    @property
    def busy_ns(self) -> int:
        """Time that the stage computed microbatches."""
        return sum(end - start for kind, _, start, end in self.spans if kind in ("forward", "backward"))


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes of one stage."""

    peak_bytes: int
    process_peak_bytes: int
    state_bytes: int


def stage_trace(
    clock: Clock,
    iteration: int,
    bounds: tuple[Any, Any],
    record: IterationRecord,
    extra: Sequence[MarkedSpan],
) -> StageTrace:
    """Resolve the marks of one iteration; ``bounds`` are the marks of its start and end."""
    spans = [*record.spans, *extra]
    marks = [*bounds, *(m for s in spans for m in (s.start, s.end)), *(m.at for m in record.messages)]
    times = iter(clock.resolve(marks))
    start_ns, end_ns = next(times), next(times)
    resolved = [(span.kind, span.microbatch, next(times), next(times)) for span in spans]
    messages = [(m.is_send, m.direction, m.microbatch, next(times)) for m in record.messages]
    busy_ns = sum(b - a for _, _, a, b in resolved[: len(record.spans)])
    alone = not clock.is_cuda and torch.get_num_threads() == 1
    return StageTrace(
        iteration,
        start_ns,
        end_ns,
        resolved,
        sends=[(d, m, t) for is_send, d, m, t in messages if is_send],
        receives=[(d, m, t) for is_send, d, m, t in messages if not is_send],
        core_share=min(1.0, sum(record.core_ns) / busy_ns) if alone and busy_ns else None,
    )


def merge(stages: Sequence[StageTrace], message_bytes: int) -> Timeline:
    """One timeline from the traces of all stages of an iteration; time 0 is the earliest start."""
    zero = min(stage.start_ns for stage in stages)
    spans = tuple(
        tuple(Span(i, kind, m, a - zero, b - zero) for kind, m, a, b in stage.spans)  # type: ignore[arg-type]
        for i, stage in enumerate(stages)
    )
    messages = []
    for i, stage in enumerate(stages):
        for direction, microbatch, sent in stage.sends:
            target = i + 1 if direction == "forward" else i - 1
            received = next(t for d, m, t in stages[target].receives if (d, m) == (direction, microbatch))
            messages.append(
                Message(i, target, direction, microbatch, message_bytes, sent - zero, received - zero)  # type: ignore[arg-type]
            )
    memory = tuple(tuple(MemorySample(max(0, t - zero), b) for t, b in stage.memory) for stage in stages)
    return Timeline(spans, tuple(sorted(messages, key=lambda m: m.send_ns)), memory)


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one iteration by part, over all stages."""

    iteration_s: float
    pipeline_s: float
    grad_sync_s: float
    optimizer_s: float
    overhead_s: float


def parts_of(stages: Sequence[StageTrace]) -> Parts:
    """Split an iteration at the last backward, the last synchronisation and the last optimizer step."""
    start = min(stage.start_ns for stage in stages)
    end = max(stage.end_ns for stage in stages)

    def last(*kinds: str) -> int:
        return max(b for stage in stages for kind, _, _, b in stage.spans if kind in kinds)

    computed, synchronised, stepped = last("forward", "backward"), last("grad_sync"), last("optimizer")
    return Parts(
        iteration_s=(end - start) / 1e9,
        pipeline_s=(computed - start) / 1e9,
        grad_sync_s=(synchronised - computed) / 1e9,
        optimizer_s=(stepped - synchronised) / 1e9,
        overhead_s=(end - stepped) / 1e9,
    )


class MetricsWriter:
    """metrics.jsonl, TensorBoard and Megatron-style log lines; used on rank 0."""

    def __init__(
        self,
        out: Path,
        log: TextIO,
        train_iters: int,
        global_batch_size: int,
        samples_per_iteration: int | None = None,
        after_iteration: int | None = None,
        wandb: WandbLog | None = None,
    ) -> None:
        self._wandb = wandb
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        if after_iteration is not None:
            # Goes on from there: what was recorded later happens again.
            _cut_metrics(out / "metrics.jsonl", after_iteration)
        self._file = (out / "metrics.jsonl").open("w" if after_iteration is None else "a")
        self._board = SummaryWriter(
            str(out / "tensorboard"),
            purge_step=None if after_iteration is None else after_iteration + 1,
        )
        self._log = log
        self._train_iters = train_iters
        self._global_batch_size = global_batch_size
        # More than the batch where extra microbatches fill the pipeline's bubbles.
        self._samples_per_iteration = samples_per_iteration or global_batch_size

    def reference(self, unigram_entropy_nats: float) -> None:
        """The loss that knowing word frequencies alone would reach."""
        self._write({"kind": "reference", "unigram_entropy_nats": unigram_entropy_nats})

    def train(self, iteration: int, values: dict[str, Any], *, print_line: bool) -> None:
        """One iteration: ``losses``, ``lr``, ``grad_norm``, ``iteration_time_s``, ``tokens_per_s``."""
        samples = iteration * self._samples_per_iteration
        self._write({"kind": "train", "iteration": iteration, "consumed_samples": samples, **values})
        losses = {f"train/{name} loss": loss for name, loss in values["losses"].items()}
        keys = ("lr", "grad_norm", "iteration_time_s", "tokens_per_s")
        self._plot(iteration, losses | {f"train/{key}": values[key] for key in keys})
        if print_line:
            self._say(
                f"iteration {iteration:8d}/{self._train_iters:8d} | consumed samples: {samples:12d} | "
                f"elapsed time per iteration (ms): {values['iteration_time_s'] * 1e3:.1f} | "
                f"learning rate: {values['lr']:.6E} | global batch size: {self._global_batch_size:5d} | "
                f"{_loss_text(values['losses'])} | {_scale_text(values)}"
                f"grad norm: {values['grad_norm']:.3f} |"
            )

    def evaluation(
        self,
        part: str,
        iteration: int,
        losses: Mapping[str, float],
        quality: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        """Losses of every head on one part of the data, and what the heads are worth there."""
        self._write({"kind": part, "iteration": iteration, "losses": dict(losses)})
        self._plot(iteration, {f"{part}/{name} loss": loss for name, loss in losses.items()})
        self._say(f"{part} loss at iteration {iteration} | {_loss_text(losses)} |")
        if quality is None:
            return
        self._write({"kind": "quality", "part": part, "iteration": iteration, "exits": quality})
        self._plot(
            iteration,
            {
                f"{part}/{name} {key.replace('_', ' ')}": value
                for name, measures in quality.items()
                for key, value in measures.items()
            },
        )
        worth = [
            f"{name.replace('_', ' ')} agrees with final: {measures['agreement_with_final']:.1%}, "
            f"calibration error: {measures['calibration_error']:.4f}"
            for name, measures in quality.items()
            if name != "final"
        ]
        if worth:
            self._say(f"{part} quality at iteration {iteration} | {' | '.join(worth)} |")

    def close(self) -> None:
        """Flush and close all files."""
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.close()

    def _plot(self, iteration: int, values: Mapping[str, float]) -> None:
        with self._or_one_line():
            for name, value in values.items():
                self._board.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(iteration, values)

    def _write(self, record: dict[str, Any]) -> None:
        with self._or_one_line():
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def _or_one_line(self) -> Iterator[None]:
        """Turn an error of the disk into one that says what to do."""
        try:
            yield
        except OSError as error:
            raise FileError(
                f"metrics in {self._out} cannot be written ({error.strerror or error}); make room or "
                "permission there; the same command goes on from the last checkpoint"
            ) from None

    def _say(self, text: str) -> None:
        print(f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", file=self._log, flush=True)


def write_measurements(
    out: Path,
    backend: Backend,
    traces: Sequence[StageTrace],
    memory: StageMemory,
    *,
    message_bytes: int,
    untimed: Sequence[int],
    wall_s: float,
) -> None:
    """Gather every stage's traces on rank 0 and write timelines.json and measured.json; collective.

    Args:
        untimed: iterations left out of time statistics (warm-up, and those slowed by measuring memory).
    """
    mine = (backend.data_rank, backend.tensor_rank, backend.pipeline_rank, list(traces), memory)
    gathered: list[Any] | None = [None] * backend.world_size if backend.rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return
    pipeline = sorted((g for g in gathered if g[:2] == (0, 0)), key=lambda g: g[2])
    iterations = [list(stages) for stages in zip(*(g[3] for g in pipeline), strict=True)]
    timed = [stages for stages in iterations if stages[0].iteration not in untimed] or iterations
    parts = [parts_of(stages) for stages in timed]
    median_s = statistics.median(p.iteration_s for p in parts)
    measured = {
        "iteration_time_s": median_s,
        "iterations_timed": len(parts),
        "pipeline_s": statistics.median(p.pipeline_s for p in parts),
        "grad_sync_s": statistics.median(p.grad_sync_s for p in parts),
        "optimizer_s": statistics.median(p.optimizer_s for p in parts),
        "overhead_s": statistics.median(p.overhead_s for p in parts),
        "iteration_times_s": [p.iteration_s for p in parts],
        "bubble_fraction": statistics.median(map(_bubble_fraction, timed, parts)),
        "busy_s": [statistics.median(s.busy_ns / 1e9 for s in stage) for stage in zip(*timed, strict=True)],
        "exits": _exits_of(timed),
        "peak_bytes": [g[4].peak_bytes for g in pipeline],
        "state_bytes": [g[4].state_bytes for g in pipeline],
        "process_peak_bytes": [g[4].process_peak_bytes for g in pipeline],
        "core_share": _core_shares(timed),
        "wall_s": wall_s,
        "device": device_fingerprint(backend.device),
        "threads": torch.get_num_threads(),
        "software": software(),
    }
    closest = sorted(timed, key=lambda stages: abs(parts_of(stages).iteration_s - median_s))[:MAX_TIMELINES]
    with_memory = [stages for stages in iterations if stages[0].memory]
    kept = {stages[0].iteration: stages for stages in [*closest, *with_memory]}
    timelines = [
        {"iteration": number, "timeline": merge(kept[number], message_bytes).to_json()}
        for number in sorted(kept)
    ]
    write_text(out / "timelines.json", json.dumps({"iterations": timelines}) + "\n")
    write_text(out / "measured.json", json.dumps(measured, indent=1) + "\n")


def _bubble_fraction(stages: Sequence[StageTrace], parts: Parts) -> float:
    """Idle share of all stages during the pipeline part, as ``plan.Prediction.bubble_fraction``."""
    return 1.0 - sum(stage.busy_ns for stage in stages) / 1e9 / (len(stages) * parts.pipeline_s)


def _exits_of(timed: Sequence[Sequence[StageTrace]]) -> dict[str, dict[str, float]]:
    """Stage, and median seconds of forward and backward for one microbatch, of every early exit."""
    found: dict[str, dict[str, float]] = {}
    for index, stage in enumerate(zip(*timed, strict=True)):
        for name, seconds in median_seconds([trace.exits for trace in stage]).items():
            found[name] = {"stage": index, **{f"{part}_s": value for part, value in seconds.items()}}
    return found


def _core_shares(timed: Sequence[Sequence[StageTrace]]) -> list[float] | None:
    """Median share of its ops' time that each stage had a core; below one, other work slowed the run."""
    shares = [[stage.core_share for stage in stages] for stages in zip(*timed, strict=True)]
    if any(share is None for stage in shares for share in stage):
        return None
    return [statistics.median(share for share in stage if share is not None) for stage in shares]


def device_fingerprint(device: torch.device) -> dict[str, Any]:
    """Kind, name, cores and memory of the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "kind": "cuda",
            "name": properties.name,
            "cores": cores,
            "memory_bytes": int(properties.total_memory),
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"kind": "cpu", "name": _cpu_name(), "cores": cores, "memory_bytes": memory}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _scale_text(values: Mapping[str, Any]) -> str:
    """What loss scaling did; nothing without it."""
    if "loss_scale" not in values:
        return ""
    skipped = "step skipped: gradients overflowed | " if values["skipped"] else ""
    return f"loss scale: {values['loss_scale']:.1f} | {skipped}"


def _loss_text(losses: Mapping[str, float]) -> str:
    ordered = sorted(losses.items(), key=lambda item: item[0] != "final")
    return " | ".join(
        f"{'lm' if name == 'final' else name.replace('_', ' ')} loss: {loss:.6E}" for name, loss in ordered
    )


def _cut_metrics(path: Path, iteration: int) -> None:
    """Cut metrics.jsonl back to what was known after ``iteration``, so that nothing appears twice.

    A run that was killed has logged iterations that its last checkpoint does not hold; they run again.
    """
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            # Half a line, written as the run was killed; it belongs to an iteration that runs again.
            continue
        if record.get("iteration", 0) <= iteration:
            lines.append(line + "\n")
    write_text(path, "".join(lines))
