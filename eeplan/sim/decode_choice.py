"""Which exits make decoding fastest: exact search under limits on training time and memory.

Two facts make it exact and cheap. Training time and peaks depend on exits only through how many each stage
has (``search``). Decode latency on one process is a sum over consecutive exits: given the deepest one, and so
the share of tokens that leave at all, the cost of the layers and the check between two exits depends on these
two alone (``inference.StepCosts``). So every vector of exits per stage is judged once, and the best depths
for it follow from dynamic programming over pairs of depths.

Shares come from the curve of tokens that could leave by each depth (``usage.leave_curve``). It may turn out
that no exit pays; that is an answer, with numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import PlanInfeasible
from eeplan.plan import Certificate, Decision
from eeplan.sim import explain
from eeplan.sim.choice import Choice, PlacedExit
from eeplan.sim.costs import CostModel, StageCosts, stage_costs
from eeplan.sim.decode_process import DecodeProcess, Exit, decode_process
from eeplan.sim.inference import step_costs
from eeplan.sim.layout import Layout, Slot, can_hold
from eeplan.sim.parameters import Head
from eeplan.sim.search import Candidate, judge
from eeplan.spec import EXIT_FORWARDS, DecodeMode, ExitForward, HeadKind
from eeplan.usage import Usage, exit_shares, leave_curve

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


@dataclass(frozen=True, slots=True)
class _Rated:
    """One vector of exits per stage, with the depths that suit decoding best."""

    candidate: Candidate
    decode_ns: float
    slots: tuple[Slot, ...]

    @property
    def rank(self) -> tuple[float, tuple[int, bool, int], tuple[Slot, ...]]:
        """Less is better: decode time, then what a search for iteration time would prefer."""
        return self.decode_ns, self.candidate.rank, self.slots


def choose_for_decoding(model: CostModel, usage: Usage) -> Choice:
    """The exits with the greatest predicted decode speed-up that the run's limits allow.

    ``exits.count: auto`` may answer with none, when none beats the model without early exits.

    Raises:
        ProfileError: the profile has no decode costs.
        PlanInfeasible: a given number of exits does not fit ``limits.device_memory_bytes``.
    """
    run = model.run
    head = Head(run.exits.head, tied=not run.exits.untie_exit_output_weights)
    process = decode_process(model.profile, model.layout, (Exit(1, head.kind),), run.decode.mode)
    curve = leave_curve(usage, run.decode.threshold, run.model.num_layers)
    table = SegmentTable(process, run.decode.mode, run.decode.recompute_limit, head.kind, curve)
    modes = EXIT_FORWARDS if run.exits.exit_forward == "auto" else (run.exits.exit_forward,)
    baseline = judge(model, list(_composed(model, [(0,) * model.layout.num_stages], head, modes[:1])))[0]
    is_auto = run.exits.count == "auto"
    most = min(run.exits.max_count, run.model.num_layers - 1) if is_auto else int(run.exits.count or 0)
    numbers = range(1, most + 1) if is_auto else (most,)
    vectors = [counts for number in numbers for counts in _vectors(number, model.layout)]
    candidates = judge(model, list(_composed(model, vectors, head, modes)))
    fitting = [c for c in candidates if c.fits(run.limits.device_memory_bytes)]
    allowed = run.limits.max_time_overhead
    within = [c for c in fitting if not is_auto or explain.overhead(c, baseline) <= allowed]
    depths = {counts: fastest_depths(counts, model.layout, table) for counts in {c.counts for c in within}}
    rated = sorted((_Rated(c, *depths[c.counts]) for c in within), key=lambda one: one.rank)
    space = len(modes) * sum(model.layout.num_placements(number) for number in numbers)
    certificate = Certificate(optimal=True, evaluated=len(candidates), space_size=space)
    found = _Found(model, usage, process, baseline, rated, certificate)
    if is_auto and (not rated or rated[0].decode_ns >= process.full_ns):
        if not baseline.fits(run.limits.device_memory_bytes):
            raise PlanInfeasible(explain.infeasible(model, baseline, baseline))
        return Choice((), baseline, baseline, (found.why_none(),), certificate)
    if not rated:
        smallest = min(candidates, key=lambda candidate: max(candidate.peak_bytes))
        raise PlanInfeasible(explain.infeasible(model, smallest, baseline))
    exits = tuple(PlacedExit(slot, head, None) for slot in rated[0].slots)
    return Choice(exits, rated[0].candidate, baseline, found.why(), certificate)


def _vectors(number: int, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Every way to spread so many exits over the stages."""
    for stages in combinations_with_replacement(range(layout.num_stages), number):
        counts = tuple(Counter(stages)[stage] for stage in range(layout.num_stages))
        if can_hold(counts, layout):
            yield counts


def _composed(
    model: CostModel, vectors: Sequence[tuple[int, ...]], head: Head, modes: Sequence[ExitForward]
) -> Iterator[tuple[ExitForward, tuple[StageCosts, ...]]]:
    for mode in modes:
        pairs = {pair for counts in vectors for pair in enumerate(counts)}
        known = {pair: stage_costs(model, pair[0], (head,) * pair[1], mode) for pair in pairs}
        yield from ((mode, tuple(known[pair] for pair in enumerate(counts))) for counts in vectors)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the search has found, best first, and the sentences about it."""

    model: CostModel
    usage: Usage
    process: DecodeProcess
    baseline: Candidate
    rated: Sequence[_Rated]
    certificate: Certificate

    def why(self) -> tuple[Decision, ...]:
        """For the best one."""
        best, run = self.rated[0], self.model.run
        number = sum(best.candidate.counts)
        other_number = [one for one in self.rated if sum(one.candidate.counts) != number]
        other_counts = [one for one in self.rated if one.candidate.counts != best.candidate.counts]
        others = [one for one in self.rated if one.candidate.counts == best.candidate.counts]
        other_mode = next((o.candidate for o in others if o.candidate is not best.candidate), None)
        count = Decision(
            subject="exits.count",
            choice=str(number),
            reason="set in the run file" if run.exits.count != "auto" else self._fastest(best),
            rejected=self._numbers(other_number[0]) if other_number else "",
        )
        placement = Decision(
            subject="exits.placement",
            choice=_places(best.slots),
            reason=self._fastest(best),
            rejected=f"{_places(other_counts[0].slots)}: {self._numbers(other_counts[0])}"
            if other_counts
            else "",
        )
        return count, placement, explain.exit_forward(self.model, best.candidate, other_mode)

    def why_none(self) -> Decision:
        """For no exits at all."""
        if self.model.run.model.num_layers == 1:
            return Decision(subject="exits.count", choice="0", reason="a single layer has no room for exits")
        if not self.rated:
            reason = (
                "not even one exit stays within limits.max_time_overhead "
                f"{100 * self.model.run.limits.max_time_overhead:g} % and the device's memory"
            )
            return Decision(subject="exits.count", choice="0", reason=reason)
        kind = self.model.run.exits.head
        layers = self.process.heads[kind].at(1) / max(1, self.process.layer.at(1))
        best = self.rated[0]
        reason = (
            f"no exit pays on this hardware for this model: {self._sentence(best)}; a check of head '{kind}' "
            f"takes as long as {layers:.2g} layers; {self._shares(best)}"
        )
        return Decision(
            subject="exits.count",
            choice="0",
            reason=reason,
            rejected=f"{_places(best.slots)}: {self._numbers(best)}",
        )

    def _fastest(self, best: _Rated) -> str:
        return (
            f"greatest decode speed-up of {self.certificate.space_size} placements: {self._sentence(best)}; "
            f"{self._shares(best)}"
        )

    def _sentence(self, one: _Rated) -> str:
        mode = self.model.run.decode.mode
        return (
            f"{explain.format_ns(round(one.decode_ns))} per token in {mode} with {_number(one)} against "
            f"{explain.format_ns(self.process.full_ns)} without early exits, "
            f"{self.process.full_ns / one.decode_ns:.3f} times as fast"
        )

    def _shares(self, one: _Rated) -> str:
        run = self.model.run
        depths = [slot.depth for slot in one.slots]
        return exit_shares(self.usage, run.decode.threshold, depths, run.model.num_layers).sentence

    def _numbers(self, one: _Rated) -> str:
        slower = explain.format_percent(explain.overhead(one.candidate, self.baseline))
        return (
            f"{_number(one)} ({one.candidate.exit_forward}): {explain.format_ns(round(one.decode_ns))} per "
            f"token, {slower} iteration time"
        )


def _number(one: _Rated) -> str:
    count = sum(one.candidate.counts)
    return "1 exit" if count == 1 else f"{count} exits"


def _places(slots: Sequence[Slot]) -> str:
    return ", ".join(f"{slot.boundary} layer {slot.layer} (stage {slot.stage})" for slot in slots)
