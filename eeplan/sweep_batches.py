"""Candidates of one configuration as arrays, and the fastest of them.

Exits of one kind cost the same wherever they read on a stage, so a placement is a vector of counts per stage.
All vectors of a configuration are bounded at once by the closed form without messages; the recurrence then
judges them from the least bound up, until no bound is below the best. The result is the planner's (tested).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import ProfileError
from eeplan.sim.bounds import in_flight_microbatches
from eeplan.sim.costs import (
    CostModel,
    StageCosts,
    Transport,
    pipeline_costs,
    shared_matrix_sync_ns,
    stage_costs,
)
from eeplan.sim.engine import message_ns
from eeplan.sim.fast import closed_form_makespans_ns, ends_ns
from eeplan.sim.layout import Layout, can_hold
from eeplan.sim.parameters import Head
from eeplan.spec import EXIT_FORWARDS, ExitForward, ExitsSpec

Integers = NDArray[np.int64]

CHUNK = 32
"""Candidates judged between two looks at the best: as many as the kernel runs side by side."""
MOST_PLACEMENTS = 200_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Candidates of one configuration group as arrays; n candidates, P stages."""

    counts: Integers
    """[n, P]"""
    heads: tuple[tuple[Head, ...], ...]
    """Of exits placed by hand, by stage; empty where all exits are of one kind."""
    stages: tuple[tuple[StageCosts, ...], ...]
    """[n][P]"""
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


def modes_of(exits: ExitsSpec) -> tuple[ExitForward, ...]:
    """Where exit forwards may run."""
    return EXIT_FORWARDS if exits.exit_forward == "auto" else (exits.exit_forward,)


def batch_of(model: CostModel, exits: ExitsSpec, count: int, modes: Sequence[ExitForward]) -> Batch:
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
    is_eager = np.repeat([mode == "eager" for mode in modes], len(counts))
    by_hand = tuple(heads) if count and exits.layers else ()
    return _arrays(model, rows, np.tile(counts, (len(modes), 1)), is_eager, by_hand)


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
    model: CostModel,
    rows: Sequence[Sequence[StageCosts]],
    counts: Integers,
    is_eager: NDArray[np.bool_],
    by_hand: tuple[tuple[Head, ...], ...],
) -> Batch:
    def column(name: str) -> Integers:
        return np.array([[getattr(stage, name) for stage in stages] for stages in rows], dtype=np.int64)

    costs = pipeline_costs(model, rows[0])
    return Batch(
        counts=counts,
        heads=by_hand,
        stages=tuple(map(tuple, rows)),
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
        message_ns=message_ns(costs),
        transport=costs.transport,
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


def peaks_of(batch: Batch, num_microbatches: int, base_bytes: int) -> tuple[Integers, Integers]:
    """Largest peak of any stage and where, [n] each; ``memory.iteration_peak_bytes`` with the base."""
    stages = batch.forward_ns.shape[1]
    in_flight = np.array([in_flight_microbatches(stages, num_microbatches, s) for s in range(stages)])
    pipeline = in_flight * batch.kept_bytes + batch.transient_bytes
    peaks = batch.state_bytes + np.maximum(pipeline, batch.optimizer_bytes) + base_bytes
    return peaks.max(axis=1), peaks.argmax(axis=1)


def least(
    batch: Batch, allowed: Integers, peaks: Integers, num_microbatches: int
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
