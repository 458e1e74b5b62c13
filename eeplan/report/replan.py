"""Two plans of one model side by side: what became of every decision, and why.

The other one is either given, or made here from the usage that the run itself measured: the question that a
first plan has to answer with a guess, how often tokens leave early, is then answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eeplan.errors import EeplanError, PlanError
from eeplan.plan import Decision, Plan
from eeplan.report import words
from eeplan.report.rundir import RunData


@dataclass(frozen=True, slots=True)
class Change:
    """One subject in both plans."""

    subject: str
    before: str
    after: str
    why: str
    """The later plan's reason; empty where nothing changed."""

    @property
    def is_change(self) -> bool:
        """Whether the plans differ in it."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Comparison:
    """An earlier and a later plan."""

    before: Plan
    after: Plan
    is_made_here: bool
    """The later one was made for the report, from the usage that the run measured."""
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Planning again is impossible with what was measured."""

    reason: str


def compared(run: RunData, other: Plan | None) -> Comparison | NoPlan | None:
    """The run's plan beside another, or beside what the planner would decide now.

    Args:
        other: a plan of the same model. The one that knows a usage is taken for the later one; if both or
            none do, the run's. None plans again with the usage and the profile in the run's folder.

    Returns:
        None where there is neither another plan nor a usage that the run's plan did not know.

    Raises:
        PlanError: the other plan is of another model.
    """
    plan = run.plan
    if other is not None:
        if other.run.model != plan.run.model:
            raise PlanError(
                f"plan of run '{other.run.name}' is of another model than run '{plan.run.name}', so there is "
                "nothing to compare; give a plan of the same model"
            )
        is_later = other.usage_sha256 is not None and plan.usage_sha256 is None
        before, after = (plan, other) if is_later else (other, plan)
        return Comparison(before, after, False, _changes(before, after))
    if run.usage is None or run.profile is None or run.usage_sha256 == plan.usage_sha256:
        return None
    from eeplan.sim.planner import make_plan

    try:
        again = make_plan(
            plan.run, plan.run_sha256, run.profile, plan.profile_sha256, run.usage, run.usage_sha256
        )
    except EeplanError as error:
        return NoPlan(str(error))
    return Comparison(plan, again, True, _changes(plan, again))


def _changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    old, new = _by_subject(before.decisions), _by_subject(after.decisions)
    subjects = dict.fromkeys([*new, *old])
    found = [
        _change(subject, old[subject].choice if subject in old else words.MISSING, new.get(subject))
        for subject in subjects
    ]
    return (*found, *_weights(before, after), *_numbers(before, after))


def _change(subject: str, before: str, decision: Decision | None) -> Change:
    after = words.MISSING if decision is None else decision.choice
    reason = "no longer decided" if decision is None else decision.reason
    return Change(subject, before, after, reason if before != after else "")


def _weights(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Loss weights can change while their policy stays."""
    old, new = (
        ", ".join(f"exit_{one.depth} {one.effective_weight:.3g}" for one in plan.exits) or "none"
        for plan in (before, after)
    )
    why = "their policy takes the shares of tokens, or the exits, that changed" if old != new else ""
    return (Change("loss weights", old, new, why),)


def _numbers(before: Plan, after: Plan) -> tuple[Change, ...]:
    old, new = (_predictions(plan) for plan in (before, after))
    names = [name for name in old if name in new]
    return tuple(Change(name, old[name], new[name], "") for name in names)


def _predictions(plan: Plan) -> dict[str, str]:
    """Predicted numbers that a reader would compare."""
    found = {"iteration, predicted": words.seconds(plan.prediction.iteration_time_s)}
    if plan.decode is None:
        return found
    found["mean depth of an emitted token"] = next(
        (f"{one.mean_depth:.2f} layers" for one in plan.decode.modes if one.mode == plan.run.decode.mode),
        words.MISSING,
    )
    for mode in plan.decode.modes:
        if mode.mode != "full":
            found[f"speed-up of {mode.mode}"] = f"{mode.speed_up:.3f}"
    return found


def to_json(found: Comparison | NoPlan | None) -> dict[str, Any] | None:
    """For programs: every subject before and after, and the later plan's reason where it changed."""
    if found is None:
        return None
    if isinstance(found, NoPlan):
        return {"problem": found.reason}
    return {
        "usage_before": usage_words(found.before),
        "usage_after": usage_words(found.after),
        "changes": [
            {"subject": one.subject, "before": one.before, "after": one.after, "why": one.why}
            for one in found.changes
        ],
    }


def usage_words(plan: Plan) -> str:
    """What a plan knew about how often tokens leave early."""
    if plan.decode is not None:
        return plan.decode.usage
    return "measured" if plan.usage_sha256 else plan.run.decode.prior.sentence()


def _by_subject(decisions: Sequence[Decision]) -> dict[str, Decision]:
    return {decision.subject: decision for decision in decisions}
