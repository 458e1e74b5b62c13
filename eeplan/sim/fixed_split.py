"""Families with one layer split and few ways to spread the exits: all candidates, judged at once.

Nothing but the recurrence is compiled for this, so that the first plan on a machine need not wait for the
branch and bound (``solve``), whose answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from eeplan.sim.family import Family, Integers, iteration_ns
from eeplan.sim.fast import ends_ns
from eeplan.sim.layout import Layout, can_hold, least_overshoot

MOST = 2048
"""Ways to spread the exits that are tried one by one."""


@dataclass(frozen=True, slots=True)
class Enumerated:
    """All candidates of a family: [n, P] exits of each stage, [n] time and peak."""

    split: tuple[int, ...]
    counts: Integers
    time_ns: Integers
    peak_bytes: Integers
    is_placed: bool
    """Exits have places of their own, so that overshoot does not count."""

    def __len__(self) -> int:
        return len(self.counts)

    def best(self) -> tuple[int, int, int, tuple[int, ...]] | None:
        """Time, peak, overshoot and exits per stage of the least candidate, None if there is none."""
        if not len(self):
            return None
        fastest = self.time_ns == self.time_ns.min()
        peak = self.peak_bytes[fastest].min()
        ties = self.counts[fastest & (self.peak_bytes == peak)].tolist()
        overshoot, counts = min((self._overshoot(counts), tuple(counts)) for counts in ties)
        return int(self.time_ns.min()), int(peak), overshoot, counts

    def _overshoot(self, counts: list[int]) -> int:
        if self.is_placed:
            return 0
        found = least_overshoot(counts, Layout(self.split))
        assert found is not None, f"{self.split} has room for {counts}"
        return found[0]


def enumerated(family: Family) -> Enumerated | None:
    """All candidates; None if the split is free, or there are more than ``MOST``."""
    layers_of = [np.flatnonzero(cells.any(axis=1)) for cells in family.allowed]
    stages, exits = family.num_stages, family.num_exits
    if any(len(choices) > 1 for choices in layers_of):
        return None
    is_placed = bool(family.exits_below[-1] >= 0)
    nothing = np.zeros((0, stages), np.int64)
    if any(len(choices) == 0 for choices in layers_of):
        return Enumerated((), nothing, nothing[:, 0], nothing[:, 0], is_placed)
    split = tuple(int(choices[0]) for choices in layers_of)
    if sum(split) != family.num_layers:
        return Enumerated((), nothing, nothing[:, 0], nothing[:, 0], is_placed)
    found = []
    for below in _exits_below(family, split):
        counts = np.diff(below).tolist()
        if is_placed or can_hold(counts, Layout(split)):
            found.append(below)
        if len(found) > MOST:
            return None
    exits_below = np.array(found, np.int64).reshape(-1, stages + 1)
    group = family.group[exits_below[:, :-1], exits_below[:, 1:]]
    here, layers = np.arange(stages), np.array(split)
    counts_of = np.diff(exits_below, axis=1)
    keep = family.allowed[here, layers, group].all(axis=1) & (counts_of != family.excluded).any(axis=1)
    exits_below, group, counts_of = exits_below[keep], group[keep], counts_of[keep]
    if not len(group):
        return Enumerated(split, counts_of, nothing[:, 0], nothing[:, 0], is_placed)
    assert exits_below[:, -1].min() == exits, "all exits are on some stage"
    sums = (family.exit_forward, family.exit_backward)
    forward, backward = (sum_[exits_below[:, 1:]] - sum_[exits_below[:, :-1]] for sum_ in sums)
    ends = ends_ns(
        family.forward + layers * family.layer_forward + forward,
        family.backward + layers * family.layer_backward + backward,
        family.num_microbatches,
        family.message,
        "rendezvous" if family.rendezvous else "asynchronous",
    )
    return Enumerated(
        split=split,
        counts=counts_of,
        time_ns=iteration_ns(family, ends, np.broadcast_to(layers, group.shape), group),
        peak_bytes=family.peak[here, layers, group].max(axis=1),
        is_placed=is_placed,
    )


def _exits_below(family: Family, split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Exits below each stage and on all of them, as the places of the exits allow."""
    stages, exits = family.num_stages, family.num_exits
    if family.exits_below[-1] < 0:
        for bars in combinations(range(exits + stages - 1), stages - 1):
            yield (0, *(bar - index for index, bar in enumerate(bars)), exits)
        return
    below: list[tuple[int, ...]] = [(0,)]
    for layers in np.cumsum(split).tolist():
        span = range(int(family.exits_below[layers]), int(family.exits_most[layers]) + 1)
        below = [(*one, count) for one in below for count in span if count >= one[-1]]
    yield from below


def count_vectors(number: int, stages: int) -> Integers:
    """Every way to spread so many exits over the stages, [n, P]."""
    bars = combinations(range(number + stages - 1), stages - 1)
    rows = [[b - a - 1 for a, b in pairwise((-1, *bar, number + stages - 1))] for bar in bars]
    return np.array(rows, np.int64)
