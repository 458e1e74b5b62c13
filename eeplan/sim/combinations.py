"""What a run leaves open beside exits, split and fill, as concrete runs: stages, microbatches, head kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from eeplan.errors import EeplanError, ProfileError, SchemaError, SpecError
from eeplan.plan import Decision
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.choice import Choice, wanted_kinds
from eeplan.sim.costs import CostModel, cost_model
from eeplan.sim.decode_process import Exit, decode_process
from eeplan.sim.layout import layout_of
from eeplan.sim.search import Budgets, Candidate
from eeplan.spec import RunSpec, replace_keys

STAGES = "parallel.pipeline_model_parallel_size"
MICRO_BATCH = "training.micro_batch_size"
HEAD = "exits.head"
_CLOSED: dict[str, Any] = {"search.pipeline_model_parallel_size": [], "search.micro_batch_size": []}
_RUNNER_UP_BUDGETS = Budgets(nodes=400_000, ties=1)
"""Only times are told of combinations that were not chosen."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to close what is open."""

    changes: Mapping[str, Any]
    """Keys of the run file and their values, in the order of ``open_values``; empty if nothing is open."""
    model: CostModel | None
    error: EeplanError | None
    """Why it cannot be judged: an impossible run, or costs that the profile lacks."""


def combinations(run: RunSpec, profile: OpProfile) -> tuple[Combination, ...]:
    """All combinations of the run's open values.

    ``data_parallel_size`` follows from the number of processes, which stays; so does the global batch.
    """
    opened = open_values(run)
    if not opened:
        return (_judged({}, run, profile),)
    found = []
    for values in product(*opened.values()):
        changes = dict(zip(opened, values, strict=True))
        try:
            concrete = replace_keys(run, {**_closing(run, changes), **changes})
        except EeplanError as error:
            found.append(Combination(changes, None, error))
            continue
        found.append(_judged(changes, concrete, profile))
    return tuple(found)


def open_values(run: RunSpec) -> dict[str, Sequence[Any]]:
    """Keys with more than the run's own value to choose from, or another one."""
    opened: dict[str, Sequence[Any]] = {
        STAGES: run.search.pipeline_model_parallel_size,
        MICRO_BATCH: run.search.micro_batch_size,
    }
    is_used = run.exits.count or any(request.head is None for request in run.exits.layers)
    # Where no exit asks for the kind, any will do.
    opened[HEAD] = run.exits.head_kinds if is_used else run.exits.head_kinds[:1]
    if run.exits.head == opened[HEAD][0]:
        del opened[HEAD]
    return {key: values for key, values in opened.items() if values}


def models_of(found: Sequence[Combination]) -> list[CostModel]:
    """Of the combinations that can be judged.

    Raises:
        EeplanError: there are none; that of the first one, with those of the others.
    """
    models = [one.model for one in found if one.model is not None]
    if models:
        return models
    error = found[0].error
    assert error is not None, "a combination has a model or an error"
    if len(found) == 1:
        raise error
    reasons = dict.fromkeys(f"{_values(one)}: {one.error}" for one in found)
    raise SpecError(f"no combination of the open values can be judged: {'; '.join(reasons)}")


def explain_combinations(found: Sequence[Combination], choice: Choice) -> tuple[Decision, ...]:
    """Which combination was taken, how the others would have done, and which were not judged."""
    if len(found) == 1 and not found[0].changes:
        return ()
    best = choice.candidate
    chosen = next(one for one in found if one.model is not None and one.model.run == best.model.run)
    others = [one for one in found if one is not chosen]
    ranked = sorted(_rejected(others, choice), key=lambda pair: pair[0])
    judged = sum(one.model is not None for one in found)
    plural = "combination" if judged == 1 else "combinations"
    what = {
        "decode_speed_up": "the fastest training among those that allow these exits",
        "iteration_time": "the fastest",
    }[best.model.run.exits.objective]
    reason = f"{what} of {judged} {plural}: {explain.format_ns(best.iteration_ns)}"
    if HEAD in chosen.changes:
        reason += (
            "; assumed, not measured: tokens leave as early with one kind of head as with another, so the "
            "least costly kind is taken"
        )
    return (
        Decision(
            subject=", ".join(key.split(".")[-1] for key in chosen.changes),
            choice=_values(chosen),
            reason=reason,
            rejected="; ".join(text for _, text in ranked),
        ),
    )


def _rejected(others: Sequence[Combination], choice: Choice) -> Iterator[tuple[tuple[int, int], str]]:
    """Each with its rank: feasible ones by time, then those too large, then those not judged."""
    for number, one in enumerate(others):
        name = _values(one)
        if one.model is None:
            yield (3 << 62, number), f"{name} not judged: {one.error}"
            continue
        assert choice.search is not None, "open runs are searched"
        search = choice.search.of([one.model], _RUNNER_UP_BUDGETS)
        outcome = search.best()
        if outcome.best is None:
            yield (2 << 62, number), f"{name}: {_too_large(search.smallest())}"
            continue
        time = explain.format_ns(outcome.best.iteration_ns)
        about = "" if outcome.proof.optimal else "about "
        slower = explain.format_percent(outcome.best.iteration_ns / choice.candidate.iteration_ns - 1.0)
        yield (outcome.best.iteration_ns, number), f"{name}: {about}{time} ({slower})"


def _too_large(candidate: Candidate) -> str:
    peak = max(candidate.peak_bytes)
    return (
        f"stage {candidate.peak_bytes.index(peak)} needs at least {explain.format_bytes(peak)}, over "
        "limits.device_memory_bytes"
    )


def _closing(run: RunSpec, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a combination.

    Raises:
        SchemaError: the processes do not divide into so many stages.
    """
    if STAGES not in changes:
        return dict(_CLOSED)
    tp, stages, processes = (
        run.parallel.tensor_model_parallel_size,
        changes[STAGES],
        run.parallel.world_size,
    )
    if processes % (stages * tp):
        raise SchemaError(
            f"{processes} processes do not divide into {stages} stages of {tp} tensor-parallel ranks"
        )
    return _CLOSED | {"parallel.data_parallel_size": processes // (stages * tp)}


def _judged(changes: Mapping[str, Any], run: RunSpec, profile: OpProfile) -> Combination:
    try:
        model = cost_model(run, profile, layout_of(run), wanted_kinds(run.exits))
        if run.exits.objective == "decode_speed_up" and run.exits.count and profile.decode:
            # What a check of this kind costs must be known, too.
            decode_process(profile, model.layout, (Exit(1, run.exits.head_kind),), run.decode.mode)
    except ProfileError as error:
        return Combination(changes, None, error)
    return Combination(changes, model, None)


def _values(one: Combination) -> str:
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in one.changes.items())
