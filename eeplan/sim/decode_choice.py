"""Which exits make decoding fastest: exact search under limits on training time and memory.

Decode latency on one process depends on the depths of the exits and their head kind alone; training time and
peaks depend on layers and exits per stage. So sets of depths are tried in the order of their latency until
one is allowed by some layer split, mode and cost model (``depth_search``), and the fastest training with
these depths is taken. Nothing is fixed beforehand: split and exits are chosen jointly.

Shares come from the curve of tokens that could leave by each depth (``usage.leave_curve``), the same for all
head kinds. It may turn out that no exit pays; that is an answer, with numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from eeplan.plan import Certificate, Decision
from eeplan.sim import explain
from eeplan.sim.choice import Choice, PlacedExit, head_of, modes_of, require_fit
from eeplan.sim.costs import CostModel, stage_costs
from eeplan.sim.decode_depths import SegmentTable
from eeplan.sim.decode_process import Exit, decode_process
from eeplan.sim.depth_search import SAME, Allowed, DepthSet, allowed_sets, depths_search, slots_at
from eeplan.sim.layout import Slot, nearly_even_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import (
    BUDGETS,
    Budgets,
    Candidate,
    Search,
    counted_search,
    judge,
    num_splits,
    split_is_free,
)
from eeplan.spec import ExitForward, HeadKind, RunSpec
from eeplan.usage import Usage, exit_shares, leave_curve

MOST_TIES = 64
"""Equally fast sets of depths that are compared by training time."""


@dataclass(frozen=True, slots=True)
class _Rated:
    """One set of depths with the training that suits it best."""

    kind: HeadKind
    decode_ns: float
    candidate: Candidate
    slots: tuple[Slot, ...]
    search: Search

    @property
    def rank(self) -> tuple[float, tuple[int, bool, int], tuple[Slot, ...]]:
        """Less is better: decode time, then what a search for iteration time would prefer."""
        return self.decode_ns, self.candidate.rank, self.slots


def choose_for_decoding(models: Sequence[CostModel], usage: Usage, budgets: Budgets = BUDGETS) -> Choice:
    """The exits with the greatest predicted decode speed-up that the run's limits allow.

    ``exits.count: auto`` may answer with none, when none beats the model without early exits.

    Args:
        models: as for :func:`eeplan.sim.choice.choose`.
        usage: share of tokens that could leave at each depth, whatever the head kind.
        budgets: of each search for the fastest training.

    Raises:
        ProfileError: the profile has no decode costs.
        PlanInfeasible: a given number of exits does not fit ``limits.device_memory_bytes``.
    """
    run = models[0].run
    tables = {kind: _table(of_kind[0], usage) for kind, of_kind in _by_kind(models)}
    bare = _bare(models, budgets)
    without = bare.best()
    baseline = without.best or bare.smallest()
    is_auto = run.exits.count == "auto"
    if is_auto:
        require_fit(baseline)
    most = min(run.exits.max_count, run.model.num_layers - 1) if is_auto else int(run.exits.count or 0)
    numbers = range(1, most + 1) if is_auto else range(most, most + 1)
    rated: list[_Rated] = []
    asked, proven = 0, True
    for kind, of_kind in _by_kind(models):
        allowed = Allowed(of_kind, head_of(of_kind[0].run.exits), modes_of(run.exits), _limit_ns(baseline))
        for number in numbers:
            rated += _best_sets(allowed, number, tables[kind], of_kind, budgets)
        asked, proven = asked + allowed.asked, proven and allowed.is_proven
    rated.sort(key=lambda one: one.rank)
    space = len(modes_of(run.exits)) * sum(
        num_splits(model) * model.layout.num_placements(number) for model in models for number in numbers
    )
    certificate = Certificate(
        optimal=proven and without.proof.optimal,
        evaluated=asked + without.proof.evaluated,
        pruned=without.proof.pruned,
        space_size=space,
    )
    found = _Found(run, usage, tables, baseline, rated, certificate)
    full_ns = next(iter(tables.values())).process.full_ns
    if is_auto and (not rated or rated[0].decode_ns >= full_ns):
        split = _split_decision(bare, baseline)
        return Choice((), baseline, baseline, (found.why_none(), split), certificate, bare)
    if not rated:
        require_fit(_counted(models, most, budgets).smallest())
        raise AssertionError("exits that fit somewhere have depths")
    best = rated[0]
    exits = tuple(PlacedExit(slot, head_of(best.candidate.model.run.exits), None) for slot in best.slots)
    decisions = (*found.why(), _split_decision(best.search, best.candidate))
    return Choice(exits, best.candidate, baseline, decisions, certificate, best.search)


def _by_kind(models: Sequence[CostModel]) -> Iterator[tuple[HeadKind, list[CostModel]]]:
    """Models with equal heads."""
    kind_of = {id(model): model.run.exits.head_kind for model in models}
    ordered = sorted(models, key=lambda model: kind_of[id(model)])
    for kind, group in groupby(ordered, key=lambda model: kind_of[id(model)]):
        yield kind, list(group)


def _table(model: CostModel, usage: Usage) -> SegmentTable:
    run, kind = model.run, model.run.exits.head_kind
    process = decode_process(model.profile, model.layout, (Exit(1, kind),), run.decode.mode)
    curve = leave_curve(usage, run.decode.threshold, run.model.num_layers)
    return SegmentTable(process, run.decode.mode, run.decode.recompute_limit, kind, curve)


def _limit_ns(baseline: Candidate) -> int | None:
    """Longest iteration without its constant overhead; as ``explain.overhead`` compares, to the ns."""
    run = baseline.model.run
    if run.exits.count != "auto":
        return None
    allowed, base = run.limits.max_time_overhead, baseline.iteration_ns
    limit = int(base * (1.0 + allowed))
    while (limit + 1) / base - 1.0 <= allowed:
        limit += 1
    while limit / base - 1.0 > allowed:
        limit -= 1
    return limit - baseline.overhead_ns


def _best_sets(
    allowed: Allowed,
    number: int,
    table: SegmentTable,
    models: Sequence[CostModel],
    budgets: Budgets,
) -> list[_Rated]:
    """The best sets of so many depths, all that decode equally fast, and the next one."""
    rated: list[_Rated] = []
    fastest_ns = None
    for found in allowed_sets(number, table, allowed):
        rated.append(_rated(found, table.kind, models, allowed, budgets))
        if fastest_ns is None:
            fastest_ns = found.decode_ns
        if found.decode_ns > fastest_ns * SAME or len(rated) == MOST_TIES:
            break
    return rated


def _rated(
    found: DepthSet, kind: HeadKind, models: Sequence[CostModel], allowed: Allowed, budgets: Budgets
) -> _Rated:
    search = depths_search(models, _head, found.depths, allowed.modes, budgets)
    candidate = search.best().best
    assert candidate is not None, f"exits at depths {found.depths} are allowed"
    return _Rated(kind, found.decode_ns, candidate, slots_at(found.depths, candidate), search)


def _head(model: CostModel) -> Head:
    return head_of(model.run.exits)


def _bare(models: Sequence[CostModel], budgets: Budgets) -> Search:
    return counted_search(models, 0, _head, modes_of(models[0].run.exits)[:1], budgets)


def _counted(models: Sequence[CostModel], number: int, budgets: Budgets) -> Search:
    return counted_search(models, number, _head, modes_of(models[0].run.exits), budgets)


def _split_decision(search: Search, best: Candidate) -> Decision:
    if not split_is_free(best.model):
        return explain.layer_split(best.model.run, best.layout)
    even = nearly_even_layout(best.layout.num_layers, best.layout.num_stages)
    return explain.free_layer_split(best, None if even == best.layout else search.with_layout(best, even))


def _other_mode(best: Candidate) -> Candidate | None:
    """The same layers and exits with the other ``exit_forward``; None when the user fixed it."""
    others: list[ExitForward] = [m for m in modes_of(best.model.run.exits) if m != best.exit_forward]
    if not others:
        return None
    stages = tuple(
        stage_costs(best.model, stage, costs.heads, others[0]) for stage, costs in enumerate(best.stages)
    )
    return judge(best.model, [(others[0], stages)])[0]


@dataclass(frozen=True, slots=True)
class _Found:
    """What the search has found, best first, and the sentences about it."""

    run: RunSpec
    usage: Usage
    tables: dict[HeadKind, SegmentTable]
    baseline: Candidate
    rated: Sequence[_Rated]
    certificate: Certificate

    def why(self) -> tuple[Decision, ...]:
        """For the best one."""
        best = self.rated[0]
        number = len(best.slots)
        other_number = [one for one in self.rated if len(one.slots) != number]
        other_depths = [one for one in self.rated if one.kind == best.kind and one.slots != best.slots]
        count = Decision(
            subject="exits.count",
            choice=str(number),
            reason="set in the run file" if self.run.exits.count != "auto" else self._fastest(best),
            rejected=self._numbers(other_number[0]) if other_number else "",
        )
        placement = Decision(
            subject="exits.placement",
            choice=_places(best.slots),
            reason=self._fastest(best),
            rejected=f"{_places(other_depths[0].slots)}: {self._numbers(other_depths[0])}"
            if other_depths
            else "",
        )
        return count, placement, explain.exit_forward(best.candidate, _other_mode(best.candidate))

    def why_none(self) -> Decision:
        """For no exits at all."""
        if self.run.model.num_layers == 1:
            return Decision(subject="exits.count", choice="0", reason="a single layer has no room for exits")
        if not self.rated:
            reason = (
                "not even one exit stays within limits.max_time_overhead "
                f"{100 * self.run.limits.max_time_overhead:g} % and the device's memory"
            )
            return Decision(subject="exits.count", choice="0", reason=reason)
        best = self.rated[0]
        process = self.tables[best.kind].process
        layers = process.heads[best.kind].at(1) / max(1, process.layer.at(1))
        reason = (
            f"no exit pays on this hardware for this model: {self._sentence(best)}; a check of head "
            f"'{best.kind}' takes as long as {layers:.2g} layers; {self._shares(best)}"
        )
        return Decision(
            subject="exits.count",
            choice="0",
            reason=reason,
            rejected=f"{_places(best.slots)}: {self._numbers(best)}",
        )

    def _fastest(self, best: _Rated) -> str:
        proven = "" if self.certificate.optimal else " found, without proof,"
        return (
            f"greatest decode speed-up{proven} of {self.certificate.space_size} placements: "
            f"{self._sentence(best)}; {self._shares(best)}"
        )

    def _sentence(self, one: _Rated) -> str:
        full_ns = self.tables[one.kind].process.full_ns
        return (
            f"{explain.format_ns(round(one.decode_ns))} per token in {self.run.decode.mode} with "
            f"{_number(one)} against {explain.format_ns(full_ns)} without early exits, "
            f"{full_ns / one.decode_ns:.3f} times as fast"
        )

    def _shares(self, one: _Rated) -> str:
        depths = [slot.depth for slot in one.slots]
        return exit_shares(self.usage, self.run.decode.threshold, depths, self.run.model.num_layers).sentence

    def _numbers(self, one: _Rated) -> str:
        slower = explain.format_percent(explain.overhead(one.candidate, self.baseline))
        return (
            f"{_number(one)} ({one.candidate.exit_forward}): {explain.format_ns(round(one.decode_ns))} per "
            f"token, {slower} iteration time"
        )


def _number(one: _Rated) -> str:
    return "1 exit" if len(one.slots) == 1 else f"{len(one.slots)} exits"


def _places(slots: Sequence[Slot]) -> str:
    return ", ".join(f"{slot.boundary} layer {slot.layer} (stage {slot.stage})" for slot in slots)
