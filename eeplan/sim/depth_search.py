"""Sets of exit depths in the order of their decode time, and which of them the limits allow: exact search.

Sets are built from the deepest exit up. A node fixes the deepest ones; the least decode time of its
completions follows from dynamic programming, so nodes leave a heap in the order of what they lead to (A*),
and the first complete set that is allowed is the best. A set is allowed if some layer split, some stage for
each exit that can be read on two, some mode and some cost model meet the limits on time and memory; branch
and bound answers that (``solve.some_within``). Taking an exit away never takes time or bytes, so a node whose
own exits are not allowed leads to nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eeplan.sim.costs import CostModel
from eeplan.sim.decode_depths import Floats, SegmentTable
from eeplan.sim.family import Family, at_depths, counted_family
from eeplan.sim.layout import Layout, Slot
from eeplan.sim.parameters import Head
from eeplan.sim.search import Budgets, Candidate, Search, split_is_free, transport_of
from eeplan.sim.solve import some_within, with_split
from eeplan.spec import ExitForward

QUESTIONS = 3000
"""Sets whose limits are checked before a search for depths gives up its proof."""
NODES = 200_000
"""Stages tried for each of them."""
SAME = 1.0 + 1e-12
"""Sums of the same times in another order differ by less."""


@dataclass(frozen=True, slots=True)
class DepthSet:
    """Depths of some exits, and how fast they decode."""

    decode_ns: float
    depths: tuple[int, ...]


class Allowed:
    """Which sets of depths the limits allow; remembers the answers.

    Args:
        models: to choose from; all heads are alike.
        head: of each exit.
        modes: where exit forwards may run.
        limit_ns: of one iteration without its constant overhead; None for any.
    """

    def __init__(
        self, models: Sequence[CostModel], head: Head, modes: Sequence[ExitForward], limit_ns: int | None
    ) -> None:
        self.models, self.head, self.modes, self.limit_ns = tuple(models), head, tuple(modes), limit_ns
        self.asked = 0
        self.is_proven = True
        """No question was left open for want of budget."""
        self._families: dict[int, list[Family]] = {}
        self._known: dict[tuple[int, ...], bool] = {}

    def number(self, count: int) -> bool:
        """Whether so many exits can be anywhere."""
        return self._some(self._counted(count))

    def __call__(self, depths: tuple[int, ...]) -> bool:
        if depths not in self._known:
            families = [at_depths(family, depths) for family in self._counted(len(depths))]
            self._known[depths] = self._some(families)
        return self._known[depths]

    def _some(self, families: Sequence[Family]) -> bool:
        self.asked += 1
        told = some_within(families, self.limit_ns, NODES)
        self.is_proven &= told is not None
        return bool(told)

    def _counted(self, count: int) -> list[Family]:
        if count not in self._families:
            self._families[count] = [
                _family(model, count, self.head, mode) for mode in self.modes for model in self.models
            ]
        return self._families[count]


def _family(model: CostModel, count: int, head: Head, mode: ExitForward) -> Family:
    family = counted_family(model, count, head, mode, transport_of(model))
    return family if split_is_free(model) else with_split(family, model.layout.layers_per_stage)


def depths_search(
    models: Sequence[CostModel],
    head: Callable[[CostModel], Head],
    depths: tuple[int, ...],
    modes: Sequence[ExitForward],
    budgets: Budgets,
) -> Search:
    """Search for the layers and stages that suit exits at these depths."""
    return Search(
        models,
        modes,
        lambda model, mode: at_depths(
            counted_family(model, len(depths), head(model), mode, transport_of(model)), depths
        ),
        lambda model, counts: [(head(model),) * count for count in counts],
        lambda model: 1,
        budgets,
    )


def slots_at(depths: Sequence[int], candidate: Candidate) -> tuple[Slot, ...]:
    """Where the exits at these depths read, given how many each stage of the candidate has."""
    stages = [stage for stage, count in enumerate(candidate.counts) for _ in range(count)]
    return tuple(_slot(depth, stage, candidate.layout) for depth, stage in zip(depths, stages, strict=True))


def _slot(depth: int, stage: int, layout: Layout) -> Slot:
    is_before = depth < layout.first_layer(stage)
    return Slot(depth, stage, depth + 1 if is_before else depth, "before" if is_before else "after")


def allowed_sets(count: int, table: SegmentTable, allowed: Allowed) -> Iterator[DepthSet]:
    """All allowed sets of ``count`` depths, those that decode fastest first.

    Ends early, without proof, when ``QUESTIONS`` are used up (``allowed.is_proven``).
    """
    num_layers = table.process.num_layers
    if not allowed.number(count):
        return
    heap: list[tuple[float, tuple[int, ...]]] = []
    least: dict[int, Floats] = {}
    for deepest in range(count, num_layers):
        fixed_ns, segment_ns = table.of(deepest)
        least[deepest] = _least_ns(segment_ns, count)
        heap.append((fixed_ns + float(least[deepest][count, deepest]), (deepest,)))
    heapq.heapify(heap)
    questions = allowed.asked + QUESTIONS
    while heap:
        bound_ns, depths = heapq.heappop(heap)
        if allowed.asked >= questions:
            allowed.is_proven = False
            return
        if not allowed(depths):
            continue
        if len(depths) == count:
            yield DepthSet(table.total_ns(depths), depths)
            continue
        more = count - len(depths)
        _, segment_ns = table.of(depths[-1])
        reach_ns = least[depths[-1]]
        passed_ns = bound_ns - float(reach_ns[more + 1, depths[0]])
        for above in range(more, depths[0]):
            time_ns = passed_ns + float(segment_ns[above, depths[0]] + reach_ns[more, above])
            heapq.heappush(heap, (time_ns, (above, *depths)))


def least_decode_ns(table: SegmentTable, count: int) -> float:
    """The fastest that any ``count`` exits decode, wherever they are."""
    return min(
        fixed_ns + float(_least_ns(segment_ns, count)[count, deepest])
        for deepest in range(count, table.process.num_layers)
        for fixed_ns, segment_ns in [table.of(deepest)]
    )


def _least_ns(segment_ns: Floats, count: int) -> Floats:
    """[c, d]: least sum of segments from depth 0 through c exits, the last of them at depth d."""
    depths = len(segment_ns)
    ascending = np.where(np.arange(depths)[:, None] < np.arange(depths), segment_ns, np.inf)
    least = np.full((count + 1, depths), np.inf)
    least[0, 0] = 0.0
    for number in range(1, count + 1):
        least[number] = (least[number - 1][:, None] + ascending).min(axis=0)
    return least
