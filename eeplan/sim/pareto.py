"""The Pareto front of training time, largest peak and decode latency over everything that a run leaves open.

Number of exits (0 to ``exits.max_count``), their places, where their forwards run, layer split, stages,
microbatch size, head kind. A point is on the front if no other is at least as good in all three and better
in one. Of the limits only the device's memory counts; ``max_time_overhead`` is what the front is there to
choose.

All splits and all numbers of exits per stage are judged by the compiled recurrence; the depths that decode
fastest for them follow from dynamic programming (``decode_depths``), which only those need that are not
beaten already by what any exits could reach. Where there are more than ``MOST`` candidates, free splits are
those alone that are fastest for some number of exits under one of ``LEVELS`` memory limits; then the points
are feasible and real, but the front is not proved to be whole. Bubbles are not filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb
from typing import Any

import numpy as np

from eeplan.errors import PlanInfeasible, SpecError
from eeplan.plan import Certificate
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.choice import head_of, modes_of
from eeplan.sim.combinations import combinations as combinations_of
from eeplan.sim.combinations import models_of
from eeplan.sim.costs import CostModel, to_ns
from eeplan.sim.decode_depths import SegmentTable, fastest_depths
from eeplan.sim.decode_process import Exit, decode_process
from eeplan.sim.depth_search import least_decode_ns
from eeplan.sim.family import Family, Integers, counted_family, iteration_ns
from eeplan.sim.fast import ends_ns
from eeplan.sim.fixed_split import count_vectors
from eeplan.sim.layout import Layout, Slot, least_overshoot
from eeplan.sim.search import Budgets, counted_search, num_splits, split_is_free, transport_of
from eeplan.spec import ExitForward, RunSpec, replace_keys
from eeplan.usage import Usage, leave_curve

MOST = 600_000
"""Candidates judged at most: models x modes x splits x exits per stage."""
LEVELS = 6
CHUNK = 1 << 15
_BUDGETS = Budgets(nodes=400_000, ties=1)


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One choice that no other beats in everything."""

    iteration_ns: int
    peak_bytes: int
    """Largest of any process."""
    decode_ns: float | None
    """Per token; None where the profile has no decode costs."""
    exits: tuple[Slot, ...]
    keys: Mapping[str, Any]
    """Keys of the run file that give this point when it is planned."""


@dataclass(frozen=True, slots=True)
class Front:
    """The points by iteration time."""

    points: tuple[FrontPoint, ...]
    certificate: Certificate
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """Candidates of one model, mode and number of exits, judged: [n] and [n, P]."""

    model: CostModel
    mode: ExitForward
    number: int
    splits: Integers
    counts: Integers
    time_ns: Integers
    peak_bytes: Integers


def pareto_front(run: RunSpec, profile: OpProfile, usage: Usage) -> Front:
    """Every point of the front.

    Raises:
        SpecError: exits placed by hand. ProfileError: as for planning.
        PlanInfeasible: not even a model without exits fits ``limits.device_memory_bytes``.
    """
    if run.exits.layers:
        raise SpecError("exits.layers places the exits by hand; a front needs exits.count auto instead")
    open_run = replace_keys(run, {"exits.count": "auto", "exits.objective": "iteration_time"})
    models = models_of(combinations_of(open_run, profile))
    splits, is_whole = _splits(models)
    decoding = _Decoding(models, usage) if profile.decode else None
    blocks = [block for model in models for block in _blocks(model, splits[id(model)])]
    front = _front(blocks, decoding)
    if not front:
        raise PlanInfeasible(_too_large(models))
    return Front(
        points=tuple(_point(entry, decoding) for entry in front),
        certificate=Certificate(
            optimal=is_whole,
            ties_settled=is_whole,
            evaluated=sum(len(block.time_ns) for block in blocks),
            space_size=sum(_space(model) for model in models),
        ),
        assumptions=tuple(_assumptions(run, decoding, is_whole)),
    )


def _assumptions(run: RunSpec, decoding: _Decoding | None, is_whole: bool) -> Iterator[str]:
    if decoding is None:
        yield "the profile has no decode costs: in place of a decode latency, more exits count as better"
    elif len(decoding.tables) > 1:
        yield "tokens leave as early with one kind of head as with another (not measured)"
    if run.fill.policy != "none":
        yield "bubbles are not filled here; the plan of a point fills them as the run file says"
    if not is_whole:
        yield "too many layer splits to judge all: the front may lack points"


def _numbers(model: CostModel) -> range:
    return range(min(model.run.exits.max_count, model.layout.num_layers - 1) + 1)


def _modes(model: CostModel, number: int) -> tuple[ExitForward, ...]:
    modes = modes_of(model.run.exits)
    return modes if number else modes[:1]


def _space(model: CostModel) -> int:
    """Models x splits x placements x modes."""
    return num_splits(model) * sum(
        len(_modes(model, number)) * model.layout.num_placements(number) for number in _numbers(model)
    )


def _candidates(model: CostModel) -> int:
    """Exits per stage and modes, for one split."""
    stages = model.layout.num_stages
    return sum(len(_modes(model, k)) * comb(k + stages - 1, stages - 1) for k in _numbers(model))


def _splits(models: Sequence[CostModel]) -> tuple[dict[int, Integers], bool]:
    """The splits to judge, [n, P] for each model, and whether they are all."""
    whole = sum(num_splits(model) * _candidates(model) for model in models) <= MOST
    found = {}
    for model in models:
        layers, stages = model.layout.num_layers, model.layout.num_stages
        if not split_is_free(model):
            rows = [model.layout.layers_per_stage]
        elif whole:
            cuts = combinations(range(1, layers), stages - 1)
            rows = [tuple(b - a for a, b in pairwise((0, *cut, layers))) for cut in cuts]
        else:
            rows = sorted(_fast_splits(model))
        found[id(model)] = np.array(rows, np.int64)
    return found, whole


def _fast_splits(model: CostModel) -> set[tuple[int, ...]]:
    """Splits that are the fastest for some number of exits under some memory limit."""
    found = {model.layout.layers_per_stage}
    for number in _numbers(model):
        limit = model.run.limits.device_memory_bytes
        step = 0
        for _ in range(LEVELS):
            limits = model.run.limits.model_copy(update={"device_memory_bytes": limit})
            limited = replace(model, run=model.run.model_copy(update={"limits": limits}))
            search = counted_search(
                [limited], number, lambda one: head_of(one.run.exits), _modes(model, number), _BUDGETS
            )
            best = search.best().best
            if best is None:
                break
            found.add(best.layout.layers_per_stage)
            peak = max(best.peak_bytes)
            step = step or max(1, (peak - max(search.smallest().peak_bytes)) // LEVELS)
            limit = peak - step
    return found


def _blocks(model: CostModel, splits: Integers) -> Iterator[_Block]:
    for number in _numbers(model):
        counts = count_vectors(number, model.layout.num_stages)
        for mode in _modes(model, number):
            family = counted_family(model, number, head_of(model.run.exits), mode, transport_of(model))
            rows = max(1, CHUNK // len(counts))
            for start in range(0, len(splits), rows):
                yield _judged(model, mode, number, family, splits[start : start + rows], counts)


def _judged(
    model: CostModel, mode: ExitForward, number: int, family: Family, splits: Integers, counts: Integers
) -> _Block:
    """All pairs of a split and exits per stage that have room and fit the device."""
    layers = np.repeat(splits, len(counts), axis=0)
    exits = np.tile(counts, (len(splits), 1))
    stages = np.arange(family.num_stages)
    keep = _have_room(layers, exits) & family.allowed[stages, layers, exits].all(axis=1)
    layers, exits = layers[keep], exits[keep]
    forward = family.forward + layers * family.layer_forward + family.exit_forward[exits]
    backward = family.backward + layers * family.layer_backward + family.exit_backward[exits]
    transport = transport_of(model)
    ends = ends_ns(forward, backward, family.num_microbatches, family.message, transport)
    return _Block(
        model=model,
        mode=mode,
        number=number,
        splits=layers,
        counts=exits,
        time_ns=iteration_ns(family, ends, layers, exits) + to_ns(model.profile.iteration_overhead_s),
        peak_bytes=family.peak[stages, layers, exits].max(axis=1, initial=0),
    )


def _have_room(layers: Integers, exits: Integers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """``layout.can_hold`` for each row."""
    num_layers = int(layers[0].sum()) if len(layers) else 0
    fits = np.ones(len(layers), np.bool_)
    deepest, below = np.zeros((2, len(layers)), np.int64)
    for stage in range(layers.shape[1]):
        first = below if stage else below + 1
        last = np.maximum(first, deepest + 1) + exits[:, stage] - 1
        below = below + layers[:, stage]
        has = exits[:, stage] > 0
        fits &= ~has | (last <= np.minimum(below, num_layers - 1))
        deepest = np.where(has, last, deepest)
    return fits


@dataclass(frozen=True, slots=True)
class _Entry:
    """One candidate of the front so far."""

    time_ns: int
    peak_bytes: int
    decode: float
    """Nanoseconds per token; without decode costs minus the number of exits."""
    block: _Block
    row: int


class _Decoding:
    """Decode times of all head kinds in question; remembers them."""

    def __init__(self, models: Sequence[CostModel], usage: Usage) -> None:
        self.tables: dict[str, SegmentTable] = {}
        for model in models:
            run, kind = model.run, model.run.exits.head_kind
            if kind not in self.tables:
                process = decode_process(model.profile, model.layout, (Exit(1, kind),), run.decode.mode)
                curve = leave_curve(usage, run.decode.threshold, run.model.num_layers)
                limit = run.decode.recompute_limit
                self.tables[kind] = SegmentTable(process, run.decode.mode, limit, kind, curve)
        self._least: dict[tuple[str, int], float] = {}
        self._fastest: dict[tuple[Any, ...], tuple[float, tuple[Slot, ...]]] = {}

    def least_ns(self, kind: str, number: int) -> float:
        """No so many exits decode faster, wherever they are."""
        if (kind, number) not in self._least:
            table = self.tables[kind]
            known = least_decode_ns(table, number) if number else table.total_ns(())
            self._least[kind, number] = known
        return self._least[kind, number]

    def fastest(self, block: _Block, row: int) -> tuple[float, tuple[Slot, ...]]:
        """Decode time and slots of the depths that suit one candidate best."""
        kind = block.model.run.exits.head_kind
        counts, split = tuple(block.counts[row].tolist()), tuple(block.splits[row].tolist())
        if not any(counts):
            return self.least_ns(kind, 0), ()
        key = (kind, split, counts)
        if key not in self._fastest:
            self._fastest[key] = fastest_depths(counts, Layout(split), self.tables[kind])
        return self._fastest[key]


def _front(blocks: Sequence[_Block], decoding: _Decoding | None) -> list[_Entry]:
    """Candidates that no other beats, by time and then by peak.

    They come in the order of time, peak and the blocks, so only those that came before can beat one; of
    equals the first is kept.
    """
    sizes = [len(block.time_ns) for block in blocks]
    index = np.repeat(np.arange(len(blocks)), sizes)
    rows = np.concatenate([np.arange(size) for size in sizes])
    times = np.concatenate([block.time_ns for block in blocks])
    peaks = np.concatenate([block.peak_bytes for block in blocks])
    least = np.repeat([_least(block, decoding) for block in blocks], sizes)
    order = np.lexsort((rows, index, peaks, times))
    front: list[_Entry] = []
    for start in range(0, len(order), CHUNK):
        some = order[start : start + CHUNK]
        beaten = np.zeros(len(some), np.bool_)
        for entry in front:
            beaten |= (peaks[some] >= entry.peak_bytes) & (least[some] >= entry.decode)
        for at in some[~beaten].tolist():
            block, row = blocks[index[at]], int(rows[at])
            _insert(front, int(times[at]), int(peaks[at]), float(least[at]), block, row, decoding)
    return front


def _least(block: _Block, decoding: _Decoding | None) -> float:
    if decoding is None:
        return -float(block.number)
    return decoding.least_ns(block.model.run.exits.head_kind, block.number)


def _insert(
    front: list[_Entry],
    time_ns: int,
    peak: int,
    least: float,
    block: _Block,
    row: int,
    decoding: _Decoding | None,
) -> None:
    """Add a candidate that is no faster than those there, if none of them is as good in everything."""

    def beaten(decode: float) -> bool:
        return any(other.peak_bytes <= peak and other.decode <= decode for other in front)

    if beaten(least):
        return
    decode = least if decoding is None else decoding.fastest(block, row)[0]
    if beaten(decode):
        return
    while front and (front[-1].time_ns, front[-1].peak_bytes) == (time_ns, peak):
        front.pop()
    front.append(_Entry(time_ns, peak, decode, block, row))


def _point(entry: _Entry, decoding: _Decoding | None) -> FrontPoint:
    block, row = entry.block, entry.row
    run, layout = block.model.run, Layout(tuple(block.splits[row].tolist()))
    if decoding is not None:
        slots = decoding.fastest(block, row)[1]
    else:
        found = least_overshoot(block.counts[row].tolist(), layout)
        assert found is not None, f"{layout} has room for {block.counts[row]}"
        slots = found[1]
    keys = {
        "parallel.pipeline_model_parallel_size": layout.num_stages,
        "parallel.data_parallel_size": run.parallel.data_parallel_size,
        "parallel.layer_split": list(layout.layers_per_stage),
        "training.micro_batch_size": run.training.micro_batch_size,
        "exits.count": None if slots else 0,
        "exits.layers": [{"layer": slot.layer, "boundary": slot.boundary} for slot in slots],
        "exits.head": run.exits.head_kind,
        "exits.exit_forward": block.mode,
        "search.pipeline_model_parallel_size": [],
        "search.micro_batch_size": [],
    }
    decode_ns = None if decoding is None else entry.decode
    return FrontPoint(entry.time_ns, entry.peak_bytes, decode_ns, slots, keys)


def _too_large(models: Sequence[CostModel]) -> str:
    search = counted_search(models, 0, lambda model: head_of(model.run.exits), ("deferred",))
    return explain.infeasible(search.smallest())
