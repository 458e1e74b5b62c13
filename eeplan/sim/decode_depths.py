"""Decode time as a sum over consecutive exits, and the depths that make it least for given stages.

Given the deepest exit, and so the share of tokens that leave at all, the cost of the layers and the check
between two exits depends on these two alone (``inference.StepCosts``). So the best of all sets of depths
follows from dynamic programming over pairs of depths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eeplan.sim.decode_process import DecodeProcess
from eeplan.sim.inference import step_costs
from eeplan.sim.layout import Layout, Slot
from eeplan.spec import DecodeMode, HeadKind

Floats = NDArray[np.float64]


class SegmentTable:
    """Expected decode time between any two depths, for every depth that may be the deepest exit's.

    Args:
        process: the model on one process; its exits are ignored.
        mode: ``kv_recompute`` or ``catch_up``.
        limit: most tokens that may wait.
        kind: head of every exit.
        curve: share of tokens that could leave at depth d or before, for d = 0 .. num_layers - 1.
    """

    def __init__(
        self,
        process: DecodeProcess,
        mode: DecodeMode,
        limit: int,
        kind: HeadKind,
        curve: Sequence[float],
    ) -> None:
        self.process, self.mode, self.limit, self.kind, self.curve = process, mode, limit, kind, curve
        self._known: dict[int, tuple[float, Floats]] = {}

    def of(self, deepest: int) -> tuple[float, Floats]:
        """With the deepest exit at that depth: what every token costs beyond its segments, and ns[a, b] of
        the segment from depth a to an exit at depth b."""
        if deepest not in self._known:
            costs = step_costs(self.process, self.mode, self.curve[deepest], self.limit)
            left = self.curve[: deepest + 1]
            layer = np.array([costs.layer_ns(share) for share in left])
            check = np.array([costs.check_ns(share, self.kind) for share in left])
            gaps = np.arange(deepest + 1) - np.arange(deepest + 1)[:, None]
            rest = (self.process.num_layers - deepest) * layer[-1] + costs.final_ns(left[-1])
            self._known[deepest] = costs.fixed_ns + rest, gaps * layer[:, None] + check[:, None]
        return self._known[deepest]

    def total_ns(self, depths: Sequence[int]) -> float:
        """Expected nanoseconds per token with exits at these depths, ascending; without any, those of full
        decoding."""
        if not depths:
            return float(self.process.full_ns)
        fixed_ns, segment_ns = self.of(depths[-1])
        total, above = fixed_ns, 0
        for depth in depths:
            total += float(segment_ns[above, depth])
            above = depth
        return float(total)


def fastest_depths(
    counts: Sequence[int], layout: Layout, table: SegmentTable
) -> tuple[float, tuple[Slot, ...]]:
    """The depths at which so many exits on each stage make decoding fastest; some must be wanted.

    Returns:
        Expected nanoseconds per token, and the slots by depth, the shallowest of equally good ones.
    """
    wanted = [layout.slots(stage) for stage, count in enumerate(counts) for _ in range(count)]
    best: tuple[float, tuple[Slot, ...]] = (np.inf, ())
    for last in wanted[-1]:
        fixed_ns, segment_ns = table.of(last.depth)
        found = _shortest_chain([*wanted[:-1], (last,)], segment_ns)
        if found is not None and fixed_ns + found[0] < best[0]:
            best = fixed_ns + found[0], found[1]
    assert best[1], f"stages with layers {layout.layers_per_stage} cannot hold {tuple(counts)} exits"
    return best


def _shortest_chain(
    wanted: Sequence[tuple[Slot, ...]], segment_ns: Floats
) -> tuple[float, tuple[Slot, ...]] | None:
    """Least sum of segments from depth 0 through one slot of each entry, at ascending depths."""
    depths, total = np.array([0]), np.array([0.0])
    came_from: list[NDArray[np.intp]] = []
    for slots in wanted:
        here = np.array([slot.depth for slot in slots])
        within = here < len(segment_ns)
        costs = np.full((len(depths), len(here)), np.inf)
        costs[:, within] = (
            total[:, None] + segment_ns[np.ix_(depths.clip(max=len(segment_ns) - 1), here[within])]
        )
        costs[depths[:, None] >= here[None, :]] = np.inf
        came_from.append(costs.argmin(axis=0))
        depths, total = here, costs.min(axis=0)
    if not np.isfinite(total.min()):
        return None
    index = int(total.argmin())
    chain = []
    for slots, origin in zip(reversed(wanted), reversed(came_from), strict=True):
        chain.append(slots[index])
        index = int(origin[index])
    return float(total.min()), tuple(reversed(chain))
