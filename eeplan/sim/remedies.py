"""The smallest changes that would make an infeasible run feasible: every single change, planned again.

Nothing is guessed: a change is reported only if a plan with it meets all limits, with the time of that plan.
Of changes that come in sizes (fewer exits, smaller microbatches, more stages) the smallest that works is
taken. Changes whose op costs the profile lacks cannot be judged, and are named as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eeplan.errors import EeplanError, PlanInfeasible, ProfileError
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.choice import Choice, choose
from eeplan.sim.combinations import Combination, combinations, models_of
from eeplan.sim.decode_choice import choose_for_decoding
from eeplan.sim.fill_choice import choose_fill
from eeplan.sim.search import BUDGETS, Budgets
from eeplan.spec import HEAD_KINDS, FillCounts, RunSpec, replace_keys
from eeplan.usage import Usage

FEW = Budgets(nodes=300_000, ties=1)
"""A remedy must be feasible; that it is the fastest of its kind need not be proved."""
MEMORY = "limits.device_memory_bytes"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the run file with which the run can be planned."""

    sentence: str
    changes: Mapping[str, Any]
    """Keys of the run file and their new values."""
    iteration_ns: int
    slower: float
    """Than the run as it is, on devices of any size; a fraction."""
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Remedies:
    """What helps, least loss of time first, and what could not be judged."""

    found: tuple[Remedy, ...]
    not_judged: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """For people, one remedy each."""
        lines = [
            f"{one.sentence}: {explain.format_ns(one.iteration_ns)} per iteration "
            f"({explain.format_percent(one.slower)}), largest peak {explain.format_bytes(one.peak_bytes)}"
            for one in self.found
        ]
        head = (
            "single changes that make it feasible, with their iteration time against this run on devices of "
            "any size:"
            if lines
            else "no single change makes it feasible"
        )
        tail = [f"not judged, for want of costs: {', '.join(self.not_judged)}"] if self.not_judged else []
        return (head, *(f"  {line}" for line in lines), *tail)


@dataclass(frozen=True, slots=True)
class _Change:
    sentence: str
    changes: Mapping[str, Any]


def decide(found: Sequence[Combination], usage: Usage, budgets: Budgets = BUDGETS) -> Choice:
    """Exits, layers and combination of the open values, by the run's objective.

    Raises:
        PlanInfeasible, ProfileError, SpecError: as ``planner.make_plan``.
    """
    models = models_of(found)
    exits = models[0].run.exits
    if exits.objective == "decode_speed_up" and exits.count:
        return choose_for_decoding(models, usage, budgets)
    return choose(models, budgets)


def find_remedies(run: RunSpec, profile: OpProfile, usage: Usage) -> Remedies:
    """Every single change that makes ``run`` feasible.

    Args:
        run: infeasible.
        profile: as for planning.
        usage: as for planning.
    """
    free = replace_keys(run, {MEMORY: None})
    unlimited = decide(combinations(free, profile), usage, FEW)
    base_ns = choose_fill(unlimited.candidate.model, unlimited).candidate.iteration_ns
    found: list[Remedy] = []
    not_judged: list[str] = []
    for sizes in _changes(run):
        unknown = []
        for change in sizes:
            try:
                found.append(_tried(run, profile, usage, change, base_ns))
                break
            except ProfileError:
                unknown.append(change.sentence)
            except EeplanError:
                # Impossible or infeasible with this change, too.
                continue
        else:
            not_judged += unknown[:1]
    found += _larger_device(run, profile, usage, base_ns)
    return Remedies(tuple(sorted(found, key=lambda one: one.iteration_ns)), tuple(not_judged))


def _tried(run: RunSpec, profile: OpProfile, usage: Usage, change: _Change, base_ns: int) -> Remedy:
    changed = replace_keys(run, dict(change.changes))
    choice = decide(combinations(changed, profile), usage, FEW)
    candidate = choose_fill(choice.candidate.model, choice).candidate
    return Remedy(
        sentence=change.sentence,
        changes=change.changes,
        iteration_ns=candidate.iteration_ns,
        slower=candidate.iteration_ns / base_ns - 1.0,
        peak_bytes=max(candidate.peak_bytes),
    )


def _larger_device(run: RunSpec, profile: OpProfile, usage: Usage, base_ns: int) -> Iterator[Remedy]:
    """The least memory with which the run is feasible."""
    limit = run.limits.device_memory_bytes
    if limit is None:
        return
    needed = least_memory_bytes(run, profile, usage)
    sentence = (
        f"devices with {explain.format_bytes(needed - limit)} more ({needed - limit} bytes; "
        f"{MEMORY} {needed})"
    )
    try:
        yield _tried(run, profile, usage, _Change(sentence, {MEMORY: needed}), base_ns)
    except EeplanError as error:
        raise AssertionError(f"{needed} bytes were found to suffice") from error


def least_memory_bytes(run: RunSpec, profile: OpProfile, usage: Usage) -> int:
    """The smallest ``limits.device_memory_bytes`` with which ``run`` can be planned."""
    free = replace_keys(run, {MEMORY: None})
    exits = free.exits
    if isinstance(run.fill.policy, FillCounts):
        # The counts are set, and change the peaks of the stages in their own ways.
        return _bisected(run, profile, usage)
    if exits.count == "auto":
        free = replace_keys(free, {"exits.count": 0})
    free = replace_keys(free, {"exits.objective": "iteration_time"})
    search = decide(combinations(free, profile), usage, FEW).search
    assert search is not None, "training time was searched"
    return max(search.smallest().peak_bytes)


def _bisected(run: RunSpec, profile: OpProfile, usage: Usage) -> int:
    def fits(limit: int | None) -> int | None:
        try:
            limited = replace_keys(run, {MEMORY: limit})
            choice = decide(combinations(limited, profile), usage, FEW)
            return max(choose_fill(choice.candidate.model, choice).candidate.peak_bytes)
        except PlanInfeasible:
            return None

    high = fits(None)
    low = run.limits.device_memory_bytes
    assert high is not None, "without a limit everything fits"
    assert low is not None, "without a limit nothing is refused"
    while high - low > 1:
        middle = (low + high) // 2
        peak = fits(middle)
        low, high = (middle, high) if peak is None else (low, min(peak, high))
    return high


def _changes(run: RunSpec) -> Iterator[list[_Change]]:
    """Single changes; of each kind the smallest first."""
    yield from _exit_changes(run)
    parallel, training = run.parallel, run.training
    if parallel.layer_split != "auto":
        yield [_Change("another layer split (parallel.layer_split auto)", {"parallel.layer_split": "auto"})]
    granularities = {None: ("selective", "full"), "selective": ("full",), "full": ()}
    for granularity in granularities[training.recompute_granularity]:
        key = "training.recompute_granularity"
        yield [_Change(f"{key} {granularity}", {key: granularity})]
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield [_Change("parallel.sequence_parallel true", {"parallel.sequence_parallel": True})]
    if parallel.data_parallel_size > 1 and not parallel.use_distributed_optimizer:
        key = "parallel.use_distributed_optimizer"
        yield [_Change(f"{key} true", {key: True})]
    if training.precision == "fp32":
        for precision in ("bf16", "fp16"):
            yield [_Change(f"training.precision {precision}", {"training.precision": precision})]
    yield [
        _Change(f"training.micro_batch_size {size}", {"training.micro_batch_size": size})
        for size in range(training.micro_batch_size - 1, 0, -1)
        if not run.search.micro_batch_size
        and training.global_batch_size % (size * parallel.data_parallel_size) == 0
    ]
    if not run.search.pipeline_model_parallel_size:
        yield from _stage_changes(run)
    if isinstance(run.fill.policy, FillCounts):
        yield _fill_changes(run.fill.policy)


def _exit_changes(run: RunSpec) -> Iterator[list[_Change]]:
    exits = run.exits
    if isinstance(exits.count, int) and exits.count:
        yield [
            _Change(f"exits.count {count} instead of {exits.count}", {"exits.count": count})
            for count in range(exits.count - 1, -1, -1)
        ]
    for index, request in enumerate(exits.layers):
        left = [one.model_dump(mode="json") for at, one in enumerate(exits.layers) if at != index]
        yield [_Change(f"no exit {request.boundary} layer {request.layer}", {"exits.layers": left})]
    if len(exits.layers) > 1:
        yield [_Change("no early exits", {"exits.layers": []})]
    if not exits.count and not exits.layers:
        return
    if isinstance(exits.head, str) and exits.head != "auto":
        for kind in HEAD_KINDS:
            if kind != exits.head:
                yield [_Change(f"exits.head {kind}", {"exits.head": kind})]
    if exits.exit_forward == "eager":
        yield [_Change("exits.exit_forward deferred", {"exits.exit_forward": "deferred"})]
    if exits.untie_exit_output_weights:
        key = "exits.untie_exit_output_weights"
        yield [_Change(f"{key} false", {key: False})]


def _stage_changes(run: RunSpec) -> Iterator[list[_Change]]:
    """More stages in place of data-parallel ranks, and with more processes."""
    stages, ranks = run.parallel.pipeline_model_parallel_size, run.parallel.data_parallel_size
    key = "parallel.pipeline_model_parallel_size"
    others = range(stages + 1, run.model.num_layers + 1)
    yield [
        _Change(
            f"{key} {more} (and data_parallel_size {stages * ranks // more})",
            {key: more, "parallel.data_parallel_size": stages * ranks // more},
        )
        for more in others
        if stages * ranks % more == 0
    ]
    width = run.parallel.world_size // stages
    multiples = [more for more in others if more % stages == 0]
    yield [
        _Change(f"{key} {more}, with {more * width} processes instead of {stages * width}", {key: more})
        for more in multiples
    ]


def _fill_changes(policy: FillCounts) -> list[_Change]:
    fewer: list[_Change] = [
        _Change(
            f"fill.policy.warmup {count} instead of {policy.warmup}",
            {"fill.policy": {"warmup": count, "cooldown": policy.cooldown}},
        )
        for count in range(policy.warmup - 1, -1, -1)
    ]
    return [*fewer, _Change("fill.policy none", {"fill.policy": "none"})]


def with_remedies(error: PlanInfeasible, run: RunSpec, profile: OpProfile, usage: Usage) -> PlanInfeasible:
    """The same error with what would help as its details."""
    if run.limits.device_memory_bytes is None:
        return error
    remedies = find_remedies(run, profile, usage)
    told = PlanInfeasible(str(error))
    told.details = remedies.lines
    told.remedies = tuple(
        {
            "change": one.sentence,
            "keys": dict(one.changes),
            "iteration_time_s": one.iteration_ns / 1e9,
            "slower": one.slower,
            "peak_bytes": one.peak_bytes,
        }
        for one in remedies.found
    )
    return told
