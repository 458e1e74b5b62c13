"""The decode part of a plan: every mode's predicted speed, what it supposes, and the mode that wins."""

from __future__ import annotations

from collections.abc import Sequence

from eeplan.plan import Decision, DecodeModePrediction, DecodePrediction
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.choice import PlacedExit
from eeplan.sim.decode_process import Exit, costs_for, decode_process
from eeplan.sim.inference import Latency, decode_prediction
from eeplan.sim.layout import Layout
from eeplan.spec import DECODE_MODES, DecodeMode, RunSpec
from eeplan.usage import ExitShares

SUBJECT = "decode.mode"


def plan_decode(
    run: RunSpec, profile: OpProfile, layout: Layout, placed: Sequence[PlacedExit], usage: ExitShares
) -> tuple[DecodePrediction | None, Decision]:
    """Predict all decoding modes of the planned model.

    Args:
        placed: the plan's exits.
        usage: share of tokens that leaves at each of them.

    Returns:
        The plan's section, None when the profile has no decode costs, and which mode is fastest.

    Raises:
        ProfileError: the profile has decode costs, but not of an exit's head kind.
    """
    if not profile.decode:
        why = "the profile has no decode costs; `eeplan profile` measures them without tensor parallelism"
        return None, Decision(subject=SUBJECT, choice="not predicted", reason=why)
    exits = [Exit(one.slot.depth, one.head.kind, one.slot.stage) for one in placed]
    modes = [mode for mode in DECODE_MODES if mode != "pipeline" or layout.num_stages > 1]
    limit = run.decode.recompute_limit
    latencies = [decode_prediction(profile, layout, exits, usage, mode, limit) for mode in modes]
    section = DecodePrediction(
        threshold=run.decode.threshold,
        recompute_limit=limit,
        context_tokens=costs_for(profile, 1).context_tokens,
        exit_shares=usage.early,
        usage=usage.sentence,
        usage_is_assumption=usage.is_assumption,
        estimated=_estimated(profile, layout, exits, modes, limit) if exits else (),
        modes=tuple(map(_section_of, latencies)),
    )
    return section, _fastest_mode(latencies, usage)


def _section_of(latency: Latency) -> DecodeModePrediction:
    return DecodeModePrediction(
        mode=latency.mode,
        processes=latency.processes,
        seconds_per_token=latency.ns_per_token / 1e9,
        tokens_per_s=1e9 / latency.ns_per_token,
        speed_up=latency.speed_up,
        mean_depth=latency.mean_depth,
        layer_rows_per_token=latency.layer_rows_per_token,
        checks_per_token=latency.checks_per_token,
    )


def _estimated(
    profile: OpProfile, layout: Layout, exits: Sequence[Exit], modes: Sequence[DecodeMode], limit: int
) -> tuple[str, ...]:
    """What was not measured at the number of rows, or with the number of processes, that a mode needs."""
    process = decode_process(profile, layout, exits, "catch_up")
    costs = {"layer": process.layer, "embedding": process.embedding}
    if any(exit_.head == "block" for exit_ in exits):
        costs["exit_block"] = process.heads["block"]
    found = [f"{op}: {rows}" for op, cost in costs.items() if (rows := cost.unmeasured(limit + 1))]
    for mode in modes:
        wanted = layout.num_stages if mode == "pipeline" else 1
        measured = costs_for(profile, wanted).processes
        if measured != wanted:
            together = "1 process" if measured == 1 else f"{measured} processes at once"
            found.append(f"mode {mode}: measured with {together}, runs with {wanted}")
    return tuple(found)


def _fastest_mode(latencies: Sequence[Latency], usage: ExitShares) -> Decision:
    ranked = sorted(latencies, key=lambda latency: latency.ns_per_token)
    best, second = ranked[0], ranked[1]
    reason = f"fastest: {_numbers(best)}; {usage.sentence}"
    if not usage.depths:
        reason = f"{usage.sentence}: {_numbers(best)}"
        return Decision(subject=SUBJECT, choice="full", reason=reason)
    if best.mode == "full":
        reason = f"no early exit makes decoding faster: {_numbers(best)}; {usage.sentence}"
    return Decision(subject=SUBJECT, choice=best.mode, reason=reason, rejected=_numbers(second))


def _numbers(latency: Latency) -> str:
    time = explain.format_ns(round(latency.ns_per_token))
    where = f" on {latency.processes} processes" if latency.processes > 1 else ""
    return f"{latency.mode}{where} {time} per token, {latency.speed_up:.3f} times as fast as full"
