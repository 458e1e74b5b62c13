"""One configuration's time and memory with its exits placed best, sharing work between configurations.

Exits of one kind cost the same wherever they read on a stage, so a placement is a vector of counts per stage.
All vectors of a configuration are bounded at once by the closed form without messages; the recurrence then
judges them from the least bound up, until no bound is below the best. The result is the planner's (tested).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import ProfileError
from eeplan.profile import OpProfile
from eeplan.profile_scaling import adapted
from eeplan.sim.bounds import in_flight_microbatches
from eeplan.sim.choice import wanted_kinds
from eeplan.sim.costs import (
    CostModel,
    StageCosts,
    Transport,
    cost_model,
    pipeline_costs,
    shared_matrix_sync_ns,
    stage_costs,
    to_ns,
)
from eeplan.sim.engine import message_ns
from eeplan.sim.fast import closed_form_makespans_ns, ends_ns
from eeplan.sim.layout import Layout, can_hold, layout_of
from eeplan.sim.parameters import Head
from eeplan.spec import EXIT_FORWARDS, ExitForward, ExitsSpec, RunSpec

Integers = NDArray[np.int64]

_Key = tuple[Hashable, ...]
_EXITS_FROM = 6
"""Where the part of a key that says how exits look begins."""

CHUNK = 32
"""Candidates judged between two looks at the best: as many as the kernel runs side by side."""
MOST_PLACEMENTS = 200_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is predicted for one configuration; None where it is infeasible."""

    feasible: bool
    reason: str = ""
    num_microbatches: int | None = None
    num_exits: int | None = None
    exits_per_stage: str | None = None
    exit_forward: ExitForward | None = None
    iteration_time_s: float | None = None
    pipeline_s: float | None = None
    grad_sync_s: float | None = None
    optimizer_s: float | None = None
    time_overhead: float | None = None
    """Against the same run without exits."""
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    """Of the largest stage's process; the least possible one where nothing fits."""
    extrapolated_ops: str = ""
    interpolated_ops: str = ""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Candidates of one configuration group as arrays; n candidates, P stages."""

    counts: Integers
    """[n, P]"""
    is_eager: NDArray[np.bool_]
    """[n]"""
    forward_ns: Integers
    backward_ns: Integers
    data_sync_ns: Integers
    """[n, P]"""
    holds: NDArray[np.bool_]
    """[n, P]: a copy of the shared matrix."""
    shared_sync_ns: Integers
    """[n]"""
    optimizer_ns: Integers
    """[n]"""
    state_bytes: Integers
    kept_bytes: Integers
    transient_bytes: Integers
    optimizer_bytes: Integers
    """[n, P]"""
    message_ns: tuple[int, ...]
    transport: Transport


@dataclass(frozen=True, slots=True)
class _Best:
    """The best candidate that fits, or None, and the least peak of any."""

    batch: _Batch
    row: int | None
    pipeline_ns: int
    grad_sync_ns: int
    iteration_ns: int
    peak_bytes: int
    peak_stage: int


@dataclass(frozen=True, slots=True)
class _Shared:
    """Costs that runs share, and the first of those runs."""

    run: RunSpec
    model: CostModel | ProfileError
    """The error when the profile has no costs for them."""


class Predictor:
    """Predicts runs with one profile; keeps what runs share."""

    def __init__(self, profile: OpProfile) -> None:
        self._profile = profile
        self._models: dict[Hashable, _Shared] = {}
        self._batches: dict[Hashable, _Batch] = {}
        self._peaks: dict[Hashable, tuple[Integers, Integers]] = {}
        self._best: dict[Hashable, _Best] = {}

    def predict(self, run: RunSpec) -> Outcome:
        """Time and memory of ``run``.

        Raises:
            ProfileError: the profile is of another model, or lacks an op.
        """
        key, model = self._model(run)
        limit = run.limits.device_memory_bytes
        baseline = self._judged(key, model, run, 0, None)
        for count in _counts_to_try(run):
            best = self._judged(key, model, run, count, limit)
            if best.row is None:
                if run.exits.count == "auto" and count:
                    continue
                return self._infeasible(model, run, count, best)
            overhead = best.iteration_ns / baseline.iteration_ns - 1.0
            if run.exits.count != "auto" or not count or overhead <= run.limits.max_time_overhead:
                return self._feasible(model, run, count, best, overhead)
        raise AssertionError("trying no exits at all is the last resort")

    def _model(self, run: RunSpec) -> tuple[_Key, CostModel]:
        """Costs of everything that two runs with the same key share; only their batch and limits differ."""
        training, exits = run.training, run.exits
        # Comparing identities is fast; the objects are kept, so an identity is never given out twice.
        key = (
            *(id(run.model), id(run.parallel)),
            *(training.micro_batch_size, training.seq_length, training.precision),
            training.recompute_granularity,
            *(exits.head, exits.untie_exit_output_weights, exits.layers),
        )
        known = self._models.get(key)
        if known is None:
            known = self._models[key] = _Shared(run, self._cost_model(run))
        if isinstance(known.model, ProfileError):
            raise known.model
        return key, known.model

    def _cost_model(self, run: RunSpec) -> CostModel | ProfileError:
        kinds = wanted_kinds(run.exits) | {run.exits.head_kind}
        try:
            return cost_model(run, adapted(self._profile, run), layout_of(run), kinds)
        except ProfileError as error:
            return error

    def _judged(self, key: _Key, model: CostModel, run: RunSpec, count: int, limit: int | None) -> _Best:
        modes = _modes(run.exits)
        # Without exits nothing depends on what they would have been.
        batch_key = (key, count, modes) if count else (key[:_EXITS_FROM], 0)
        best_key = (batch_key, run.num_microbatches, limit)
        if best_key not in self._best:
            if batch_key not in self._batches:
                self._batches[batch_key] = _batch(model, run.exits, count, modes)
            self._best[best_key] = self._find(batch_key, model, run.num_microbatches, limit)
        return self._best[best_key]

    def _find(self, key: Hashable, model: CostModel, num_microbatches: int, limit: int | None) -> _Best:
        batch, stages = self._batches[key], model.layout.num_stages
        peaks_key = (key, min(num_microbatches, stages))
        if peaks_key not in self._peaks:
            self._peaks[peaks_key] = _peaks(batch, num_microbatches, model.profile.process_base_bytes)
        peaks, at_stage = self._peaks[peaks_key]
        allowed = np.arange(len(peaks)) if limit is None else np.flatnonzero(peaks <= limit)
        if not len(allowed):
            least = int(peaks.argmin())
            return _Best(batch, None, 0, 0, 0, int(peaks[least]), int(at_stage[least]))
        row, pipeline, sync, iteration = _least(batch, allowed, peaks, num_microbatches)
        overhead = to_ns(model.profile.iteration_overhead_s)
        return _Best(batch, row, pipeline, sync, iteration + overhead, int(peaks[row]), int(at_stage[row]))

    def _feasible(self, model: CostModel, run: RunSpec, count: int, best: _Best, overhead: float) -> Outcome:
        batch, training = best.batch, run.training
        assert best.row is not None, "only a candidate that fits is feasible"
        seconds = best.iteration_ns / 1e9
        counts = batch.counts[best.row].tolist()
        used = {"exit_" + run.exits.head_kind} if count and not run.exits.layers else set()
        extrapolated, interpolated = (
            [op for op in ops if run.exits.layers or not op.startswith("exit_") or op in used]
            for ops in (model.extrapolated_ops, model.interpolated_ops)
        )
        return Outcome(
            feasible=True,
            num_microbatches=run.num_microbatches,
            num_exits=sum(counts),
            exits_per_stage=" ".join(map(str, counts)),
            exit_forward="eager" if batch.is_eager[best.row] else "deferred",
            iteration_time_s=seconds,
            pipeline_s=best.pipeline_ns / 1e9,
            grad_sync_s=best.grad_sync_ns / 1e9,
            optimizer_s=int(batch.optimizer_ns[best.row]) / 1e9,
            time_overhead=overhead,
            tokens_per_s=training.global_batch_size * training.seq_length / seconds,
            peak_bytes=best.peak_bytes,
            extrapolated_ops=" ".join(extrapolated),
            interpolated_ops=" ".join(interpolated),
        )

    @staticmethod
    def _infeasible(model: CostModel, run: RunSpec, count: int, best: _Best) -> Outcome:
        limit = run.limits.device_memory_bytes
        return Outcome(
            feasible=False,
            reason=(
                f"limits.device_memory_bytes: {limit} is less than the {best.peak_bytes} bytes that stage "
                f"{best.peak_stage} of {model.layout.num_stages} needs at least"
            ),
            num_microbatches=run.num_microbatches,
            num_exits=count or len(run.exits.layers),
            peak_bytes=best.peak_bytes,
        )


def _counts_to_try(run: RunSpec) -> Iterator[int]:
    """Numbers of exits in the planner's order: from the most allowed down for ``auto``."""
    if run.exits.count == "auto":
        yield from range(min(run.exits.max_count, run.model.num_layers - 1), -1, -1)
    else:
        yield run.exits.count or len(run.exits.layers)


def _modes(exits: ExitsSpec) -> tuple[ExitForward, ...]:
    return EXIT_FORWARDS if exits.exit_forward == "auto" else (exits.exit_forward,)


def _batch(model: CostModel, exits: ExitsSpec, count: int, modes: Sequence[ExitForward]) -> _Batch:
    """All candidates with ``count`` exits; those of the first mode come first."""
    layout = model.layout
    if count and exits.layers:
        heads = [_by_hand(exits, layout, stage) for stage in range(layout.num_stages)]
        counts = np.array([[len(on_stage) for on_stage in heads]])
        tables = [[{len(heads[s]): _stage(model, s, heads[s], mode)} for s in range(layout.num_stages)]
                  for mode in modes]  # fmt: skip
    else:
        counts = _placements(layout, count)
        head = Head(exits.head_kind, tied=not exits.untie_exit_output_weights)
        # Where exits forward makes no difference without exits.
        modes = modes if count else modes[:1]
        tables = [
            [
                {c: _stage(model, s, (head,) * c, mode) for c in np.unique(counts[:, s]).tolist()}
                for s in range(layout.num_stages)
            ]
            for mode in modes
        ]
    rows = [
        [tables[m][s][c] for s, c in enumerate(vector)]
        for m in range(len(modes))
        for vector in counts.tolist()
    ]
    return _arrays(
        model, rows, np.tile(counts, (len(modes), 1)), np.repeat([m == "eager" for m in modes], len(counts))
    )


def _by_hand(exits: ExitsSpec, layout: Layout, stage: int) -> tuple[Head, ...]:
    requests = sorted(exits.layers, key=lambda request: request.depth)
    return tuple(
        Head(
            request.head or exits.head_kind,
            not exits.untie_exit_output_weights if request.tied is None else request.tied,
        )
        for request in requests
        if layout.stage_of(request) == stage
    )


def _stage(model: CostModel, stage: int, heads: tuple[Head, ...], mode: ExitForward) -> StageCosts:
    return stage_costs(model, stage, heads, mode)


def _arrays(
    model: CostModel, rows: Sequence[Sequence[StageCosts]], counts: Integers, is_eager: NDArray[np.bool_]
) -> _Batch:
    def column(name: str) -> Integers:
        return np.array([[getattr(stage, name) for stage in stages] for stages in rows], dtype=np.int64)

    return _Batch(
        counts=counts,
        is_eager=is_eager,
        forward_ns=column("forward_ns"),
        backward_ns=column("backward_ns"),
        data_sync_ns=column("data_sync_ns"),
        holds=column("holds_shared_matrix").astype(bool),
        shared_sync_ns=np.array([shared_matrix_sync_ns(model, stages) for stages in rows], dtype=np.int64),
        optimizer_ns=column("optimizer_ns").max(axis=1),
        state_bytes=column("state_bytes"),
        kept_bytes=column("kept_bytes"),
        transient_bytes=np.maximum(column("forward_transient_bytes"), column("backward_transient_bytes")),
        optimizer_bytes=column("optimizer_transient_bytes"),
        message_ns=message_ns(pipeline_costs(model, rows[0])),
        transport=model.run.parallel.p2p_communication,
    )


@lru_cache(maxsize=1024)
def _placements(layout: Layout, count: int) -> Integers:
    """All vectors of exits per stage, [n, P].

    Raises:
        ProfileError: too many for a sweep.
    """
    room = [len(layout.slots(stage)) for stage in range(layout.num_stages)]
    vectors: list[tuple[int, ...]] = []
    for vector in _vectors(count, room):
        if can_hold(vector, layout):
            vectors.append(vector)
        if len(vectors) > MOST_PLACEMENTS:
            raise ProfileError(
                f"exits.count: {count} exits on {layout.num_stages} stages have more than {MOST_PLACEMENTS} "
                "placements; plan such a run by itself"
            )
    return np.array(vectors, dtype=np.int64)


def _vectors(count: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not room:
        if not count:
            yield ()
        return
    for here in range(max(0, count - sum(room[1:])), min(count, room[0]) + 1):
        for rest in _vectors(count - here, room[1:]):
            yield (here, *rest)


def _peaks(batch: _Batch, num_microbatches: int, base_bytes: int) -> tuple[Integers, Integers]:
    """Largest peak of any stage and where, [n] each; ``memory.iteration_peak_bytes`` with the base."""
    stages = batch.forward_ns.shape[1]
    in_flight = np.array([in_flight_microbatches(stages, num_microbatches, s) for s in range(stages)])
    pipeline = in_flight * batch.kept_bytes + batch.transient_bytes
    peaks = batch.state_bytes + np.maximum(pipeline, batch.optimizer_bytes) + base_bytes
    return peaks.max(axis=1), peaks.argmax(axis=1)


def _least(
    batch: _Batch, allowed: Integers, peaks: Integers, num_microbatches: int
) -> tuple[int, int, int, int]:
    """Row, pipeline, synchronisation and iteration of the candidate with the least iteration time.

    Of equally fast ones a deferred one, then the one with the least peak, then the first.
    """
    stages = batch.forward_ns.shape[1]
    bounds = batch.optimizer_ns[allowed]
    is_whole = len(allowed) <= CHUNK
    if not is_whole:
        if num_microbatches >= stages:
            bounds = bounds + closed_form_makespans_ns(
                batch.forward_ns[allowed], batch.backward_ns[allowed], num_microbatches
            )
        order = np.argsort(bounds, kind="stable")
        allowed, bounds = allowed[order], bounds[order]
    best: tuple[int, bool, int, int] | None = None
    parts = (0, 0)
    for start in range(0, len(allowed), CHUNK):
        if best is not None and int(bounds[start]) > best[0]:
            break
        rows = allowed[start : start + CHUNK]
        # Most configurations have few candidates, all allowed; picking those costs as much as judging them.
        pick = slice(None) if is_whole and len(rows) == len(batch.forward_ns) else rows
        times = batch.forward_ns[pick], batch.backward_ns[pick]
        ends = ends_ns(*times, num_microbatches, batch.message_ns, batch.transport)
        pipeline = ends.max(axis=1)
        ready = ends + batch.data_sync_ns[pick]
        # Every stage but those holding the shared matrix is done when its own reduction is.
        shared = np.where(batch.holds[pick], ready, 0).max(axis=1) + batch.shared_sync_ns[pick]
        sync = np.maximum(ready.max(axis=1), shared) - pipeline
        iteration = pipeline + sync + batch.optimizer_ns[pick]
        for i in np.flatnonzero(iteration == iteration.min()).tolist():
            row = int(rows[i])
            rank = (int(iteration[i]), bool(batch.is_eager[row]), int(peaks[row]), row)
            if best is None or rank < best:
                best, parts = rank, (int(pipeline[i]), int(sync[i]))
    assert best is not None, "some candidate is allowed"
    return best[3], *parts, best[0]
