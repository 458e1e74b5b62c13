"""Sections that explain: where stages wait, what the time hangs on, what exits bring, what changes next."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from eeplan.plan import DecodeModePrediction, Plan
from eeplan.report import markup, tables, words
from eeplan.report.compare import decode_quantities, idle_phases, signed_error
from eeplan.report.insights import headroom_sentences, path_sentences, spare_words
from eeplan.report.replan import Comparison, NoPlan, usage_words
from eeplan.report.rundir import RunData
from eeplan.report.sections import caption


def stages(run: RunData, drawings: Mapping[str, str]) -> str:
    """Idle time by phase, room for more, and the critical path."""
    plan = run.plan
    unit = words.time_unit(max(sum(found.values()) for found in idle_phases(run)[1]))
    return markup.section(
        "stages",
        "Where stages wait, and what they could still take",
        markup.paragraph(
            "A stage warms up until its first backward, is steady until its last forward ends, and cools "
            "down from there. " + " ".join(_narrow(sentence) for sentence in headroom_sentences(plan))
        ),
        markup.columns(
            markup.figure(drawings["idle"], f"{caption(run)}.", "idle.png"),
            markup.table(_idle_words(run, unit), caption=f"Idle, predicted / measured ({unit[0]})")
            + markup.table(_room_words(plan), caption="Room of each stage, per microbatch and in bytes"),
        ),
        markup.columns(
            markup.figure(
                drawings["critical_path"],
                "Times along one critical path add up to the pipeline part. F, B: how often critical paths "
                f"pass the op's forward and backward. {caption(run)}.",
                "critical_path.png",
            ),
            markup.table(_stage_path_words(plan), caption="How often critical paths pass each stage")
            + markup.paragraph(" ".join(path_sentences(plan)), "after"),
        ),
    )


def _narrow(sentence: str) -> str:
    """Numbers stay with their units."""
    for unit in ("s", "ms", "µs"):
        sentence = sentence.replace(f" {unit} ", f"{words.THIN}{unit} ")
    return sentence


def _idle_words(run: RunData, unit: tuple[str, float]) -> pd.DataFrame:
    """One row a stage, since there may be many, with all numbers in one unit."""
    rows = []
    for stage, (expected, found) in enumerate(zip(*idle_phases(run), strict=True)):
        whole = sum(expected.values()), sum(found.values())
        pairs = {name: (expected[name], found[name]) for name in expected} | {"all": whole}
        cells = {
            name: " / ".join(words.number(seconds / unit[1]) for seconds in pair)
            for name, pair in pairs.items()
        }
        rows.append({"": f"Stage {stage}"} | cells | {"error": words.signed_percent(signed_error(*whole))})
    return pd.DataFrame(rows)


def _room_words(plan: Plan) -> pd.DataFrame:
    rows = []
    for index, stage in enumerate(plan.stages):
        room = stage.time_headroom
        rows.append(
            {
                "": f"Stage {index}",
                "for free": _room(room.free_s, room.free_side),
                "shown once": _room(room.hidden_s, room.hidden_side),
                "memory": spare_words(plan, stage),
            }
        )
    return pd.DataFrame(rows)


def _room(extra_s: float, side: str) -> str:
    if not extra_s:
        return "none"
    return words.seconds(extra_s) + ("" if side == "either" else f" in {side}")


def _stage_path_words(plan: Plan) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "": f"Stage {index}",
                "forward": words.times(stage.critical.forward),
                "backward": words.times(stage.critical.backward),
                "messages to the next": words.times(stage.critical.messages)
                if index + 1 < len(plan.stages)
                else words.MISSING,
            }
            for index, stage in enumerate(plan.stages)
        ]
    )


def decoding(run: RunData, drawings: Mapping[str, str]) -> str:
    """Predicted and measured decoding, usage and calibration; empty where nothing is known."""
    decode = run.plan.decode
    if decode is None and run.evaluation is None and run.decode_bench is None:
        return ""
    sentences = []
    if decode is not None:
        kind = "a guess, not a measurement" if decode.usage_is_assumption else "measured"
        sentences.append(
            f"The plan predicts decoding at threshold {decode.threshold:g}. How often tokens leave early was "
            f"{kind}: {decode.usage}."
        )
        if decode.estimated:
            sentences.append(f"Costs that were not measured as they are used: {'; '.join(decode.estimated)}.")
    if run.evaluation is not None:
        sentences.append(
            f"Every exit was judged on {run.evaluation.num_tokens:,} tokens: {run.evaluation.source}."
        )
    measured = decode_quantities(run)
    return markup.section(
        "decoding",
        "What early exits bring when decoding",
        markup.paragraph(" ".join(sentences)) if sentences else "",
        markup.columns(
            markup.figure(drawings["usage"], f"Held-out text. {caption(run)}.", "usage.png")
            if "usage" in drawings
            else "",
            markup.figure(
                drawings["reliability"],
                "In brackets the calibration error (Guo et al. 2017). Larger marks hold more tokens. "
                f"{caption(run)}.",
                "reliability.png",
            )
            if "reliability" in drawings
            else "",
        ),
        markup.columns(
            markup.table(_modes_words(run), caption="One sequence at a time, predicted")
            if decode is not None
            else "",
            markup.table(tables.comparison_words(measured), caption="Speed, predicted and measured")
            if measured
            else "",
        ),
    )


def _modes_words(run: RunData) -> pd.DataFrame:
    decode = run.plan.decode
    assert decode is not None, "the caller has looked"
    return pd.DataFrame([_mode_words(mode) for mode in decode.modes])


def _mode_words(mode: DecodeModePrediction) -> dict[str, str]:
    name = mode.mode if mode.processes == 1 else f"{mode.mode}, {mode.processes} processes"
    return {
        "": name,
        "per token": words.seconds(mode.seconds_per_token),
        "speed-up": f"{mode.speed_up:.2f}",
        "mean depth": f"{mode.mean_depth:.2f}",
        "layers run": f"{mode.layer_rows_per_token:.2f}",
    }


def replanned(found: Comparison | NoPlan | None) -> str:
    """What another plan decides otherwise, and why; empty without one."""
    if found is None:
        return ""
    heading = "What the measured usage changes"
    if isinstance(found, NoPlan):
        return markup.section(
            "replanned",
            heading,
            markup.paragraph(f"Planning again with the usage that this run measured fails: {found.reason}."),
        )
    changed = [change.subject for change in found.changes if change.is_change and change.why]
    later = (
        "The planner was asked again, with the usage that this run measured." if found.is_made_here else ""
    )
    verdict = (
        f"It decides otherwise on {words.listing(changed)}."
        if changed
        else "Every decision stays as it was; only predictions move."
    )
    table = pd.DataFrame(
        [
            {
                "subject": change.subject,
                "before": change.before,
                "after": change.after if change.is_change else "the same",
                "why": change.why,
            }
            for change in found.changes
        ]
    )
    return markup.section(
        "replanned",
        heading if found.is_made_here else "What changed from one plan to the other",
        markup.paragraph(
            f"{later} Before, tokens leaving early were {_before(usage_words(found.before))}. After: "
            f"{usage_words(found.after)}. {verdict}".strip()
        ),
        markup.table(table, "prose"),
    )


def _before(text: str) -> str:
    return text if text.startswith(("assumed", "measured")) else f"described as: {text}"
