"""Decode costs and predictions as cells of tables; ``views`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from eeplan.report import words

if TYPE_CHECKING:
    from eeplan.plan import DecodePrediction
    from eeplan.profile import DecodeCosts


class Cells(NamedTuple):
    """Title, rows and column names of one table."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...]


def prediction_cells(decode: DecodePrediction | None) -> tuple[Cells, ...]:
    """Expected speed of every mode; no table where nothing was predicted."""
    if decode is None:
        return ()
    rows = tuple(
        (
            m.mode if m.processes == 1 else f"{m.mode} on {m.processes} processes",
            words.seconds(m.seconds_per_token),
            f"{words.number(m.tokens_per_s)} tokens/s",
            f"{m.speed_up:.2f}",
            f"{m.mean_depth:.1f}",
            f"{m.layer_rows_per_token:.1f}",
        )
        for m in decode.modes
    )
    title = f"decoding one sequence, predicted at threshold {decode.threshold:g}; usage {decode.usage}"
    return (Cells(title, rows, ("mode", "per token", "rate", "over full", "mean depth", "layers run")),)


def costs_cells(costs: DecodeCosts) -> Cells:
    """Mean time of every op by number of rows, all of one sequence."""
    measured = {
        (cost.op, cost.rows): words.seconds(cost.time.mean_s) for cost in costs.ops if cost.sequences == 1
    }
    numbers = sorted({rows for _, rows in measured})
    ops = dict.fromkeys(cost.op for cost in costs.ops)
    rows = tuple((op, *(measured.get((op, number), "-") for number in numbers)) for op in ops)
    title = (
        f"decode steps, mean by number of rows: {words.plural(costs.processes, 'process', 'processes')}, "
        f"{words.plural(costs.threads, 'thread')} each, {costs.context_tokens} tokens back"
    )
    return Cells(title, rows, ("op", *map(str, numbers)))


def evaluation_cells(result: Mapping[str, Any]) -> tuple[Cells, Cells]:
    """Quality of every exit, and what every threshold gives."""
    heads = tuple(
        (
            head["name"],
            f"{head['cross_entropy']:.3f}",
            words.percent(head["accuracy"]),
            words.percent(head["agreement_with_final"]),
            f"{head['calibration_error']:.3f}",
        )
        for head in result["exits"]
    )
    title = f"exits on {result['data']}, {words.number(result['num_tokens'])} tokens"
    quality = Cells(title, heads, ("exit", "cross entropy", "accuracy", "as final", "calibration error"))
    speeds = [_speed_ups(point) for point in result["thresholds"]]
    rows = tuple(
        (
            f"{point['threshold']:.2f}",
            *(words.percent(share) for share in point["exit_shares"]),
            f"{point['mean_depth']:.2f}",
            words.percent(point["agreement_with_final"]),
            words.percent(point["accuracy"]),
            *speed.values(),
        )
        for point, speed in zip(result["thresholds"], speeds, strict=True)
    )
    columns = ("threshold", *(head["name"] for head in result["exits"]), "mean depth", "as final", "accuracy")
    title = f"tokens by exit and threshold, confidence {result['confidence']}; {_speed_words(result)}"
    return quality, Cells(title, rows, (*columns, *speeds[0]))


def _speed_ups(point: Mapping[str, Any]) -> dict[str, str]:
    """Speed-ups over ``full`` at a threshold by column; what was measured follows its prediction."""
    measured = point["measured"]
    found: dict[str, str] = {}
    for mode, predicted in (point["predicted"] or {}).items():
        if mode != "full":
            found[mode] = f"{predicted['speed_up']:.2f}"
        if measured is not None and mode == measured["mode"]:
            found["measured"] = f"{measured['speed_up']:.2f}"
    if measured is not None and "measured" not in found:
        found["measured"] = f"{measured['speed_up']:.2f}"
    return found


def _speed_words(result: Mapping[str, Any]) -> str:
    """What the columns of speed-ups are."""
    point, speed = result["thresholds"][0], result["speed"]
    said = "speed-up over full as predicted" if point["predicted"] else "no profile to predict speed from"
    if speed is None:
        return said
    prompts = words.plural(speed["prompts"], "prompt")
    return f"{said}; measured: {point['measured']['mode']} over full, median of {prompts}"
