"""A plan's headroom and critical path in words, for terminals and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eeplan.plan import PathCount, Plan, StagePlan
from eeplan.report import words


@dataclass(frozen=True, slots=True)
class PathPart:
    """One part of the critical path of an iteration."""

    name: str
    critical_s: float
    share: float
    """Of the pipeline part."""
    forward: PathCount | None
    """None for what is no op of the model."""
    backward: PathCount | None


def parts_of_path(plan: Plan) -> tuple[PathPart, ...]:
    """Parts of the pipeline's time along one critical path, in model order; they add up to it."""
    whole_s = plan.prediction.pipeline_s or 1.0
    parts = [
        PathPart(one.op, one.critical_s, one.critical_s / whole_s, one.forward, one.backward)
        for one in plan.critical_path.ops
    ]
    other_s = plan.critical_path.other_s
    return (*parts, *([PathPart("executor", other_s, other_s / whole_s, None, None)] if other_s else []))


def path_sentences(plan: Plan) -> tuple[str, ...]:
    """How to read the counts, ties included if there are any."""
    counts = [count for part in parts_of_path(plan) for count in (part.forward, part.backward) if count]
    sentence = "One millisecond more of an op makes the iteration as many milliseconds longer as it counts"
    tie = max(counts, key=lambda count: count.most - count.least)
    if tie.most == tie.least:
        return (f"{sentence}.",)
    return (
        f"{sentence}; {words.times(tie)}: several paths are equally long, one millisecond less gains "
        f"{tie.least}, one more costs {tie.most}.",
    )


def headroom_sentences(plan: Plan) -> tuple[str, ...]:
    """What the stages could do in addition: for free, then hidden; one sentence each, the widest room first.

    Forward and backward may have different room; the side is named where they do.
    """
    free = [stage.time_headroom.free_s for stage in plan.stages]
    hidden = [stage.time_headroom.hidden_s for stage in plan.stages]
    sentences = []
    if max(free) > 0:
        index = free.index(max(free))
        room = plan.stages[index].time_headroom
        sentences.append(
            f"Stage {index} can take another {_time(room.free_s)} per microbatch for free"
            f"{_where(room.free_side)}{_others(free, index)}."
        )
    if max(hidden) > max(free):
        index = hidden.index(max(hidden))
        room = plan.stages[index].time_headroom
        sentences.append(
            f"Stage {index} can take another {_time(room.hidden_s)} per microbatch{_where(room.hidden_side)} "
            f"and make the iteration only that much longer, not {_microbatches(plan)} times"
            f"{_others(hidden, index)}."
        )
    if not sentences:
        sentences.append(
            "No stage has room: whatever one takes longer per microbatch shows more than once an iteration."
        )
    return tuple(sentences)


def spare_words(plan: Plan, stage: StagePlan) -> str:
    """Bytes that the stage's process could hold in addition, and up to what."""
    up_to = "the limit" if plan.run.limits.device_memory_bytes is not None else "the largest stage"
    return f"{words.size(stage.spare_bytes)} below {up_to}"


def _microbatches(plan: Plan) -> int:
    return plan.fill.num_full if plan.fill else plan.num_microbatches


def _time(seconds: float) -> str:
    return words.seconds(seconds).replace(words.THIN, " ")


def _where(side: str) -> str:
    return "" if side == "either" else f" in its {side}"


def _others(rooms: Sequence[float], best: int) -> str:
    """The other stages with room."""
    found = [f"stage {i} {_time(room)}" for i, room in enumerate(rooms) if room and i != best]
    if not found or len(found) > 5:
        return f"; {len(found)} other stages have room, too" if found else ""
    return f" ({words.listing(found)})"
