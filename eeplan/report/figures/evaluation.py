"""What ``eeplan evaluate`` found, as figures: calibration, usage and agreement, speed-up by threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eeplan.files import require_writable_folder, write_bytes
from eeplan.report import words
from eeplan.report.evaluations import ThresholdWorth, judged
from eeplan.report.figures.decode_bench import mode_colour
from eeplan.report.figures.exits import reliability_figure, usage_figure
from eeplan.report.palette import MUTED
from eeplan.report.style import HALF_WIDTH_IN, house_style, legend_above, new_figure, png


def write_figures(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Draw what ``eeplan evaluate --json`` prints.

    Returns:
        ``reliability.png``; with early exits ``usage.png``; and ``speed.png`` where speed was predicted or
        measured.

    Raises:
        FileError: the folder cannot be written.
    """
    require_writable_folder(folder, "folder of figures")
    written = []
    for name, figure in figures(result).items():
        written.append(folder / f"{name}.png")
        write_bytes(written[-1], png(figure))
    return written


def figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures by the names of their files; see :func:`write_figures`."""
    worth, names = judged(result), [one["name"] for one in result["exits"]]
    text, plan_threshold = f"{result['data']}; confidence {result['confidence']}", result["plan_threshold"]
    drawn = {"reliability": reliability_figure(worth, names, result["data"])}
    if len(names) > 1:
        drawn["usage"] = usage_figure(worth, names, plan_threshold, text)
    if any(point.predicted or point.measured for point in worth.thresholds):
        drawn["speed"] = speed_figure(worth.thresholds, plan_threshold, _speed_caption(result))
    return drawn


def speed_figure(thresholds: Sequence[ThresholdWorth], plan_threshold: float, caption: str) -> Figure:
    """Speed-up over ``full`` by threshold: dashed as predicted, a line for each mode; solid as measured.

    Args:
        plan_threshold: that the plan decodes with, marked.
    """
    points = sorted(thresholds, key=lambda point: point.threshold)
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 3.6, "Speed-up of one sequence, by threshold", caption)
        axes = figure.add_subplot()
        axes.axhline(1.0, color=MUTED, linewidth=0.8, zorder=1)
        axes.axvline(plan_threshold, color=MUTED, linestyle=":", linewidth=1, gid="threshold")
        handles = []
        for mode in (one for one in points[0].predicted or {} if one != "full"):
            at = [(one.threshold, one.predicted[mode].speed_up) for one in points if one.predicted]
            style: dict[str, Any] = {"color": mode_colour(mode), "linestyle": "--", "linewidth": 1.3}
            axes.plot(*zip(*at, strict=True), gid=f"predicted-{mode}", **style)
            handles.append(Line2D([], [], label=f"{mode}, predicted", **style))
        found = [(one.threshold, one.measured) for one in points if one.measured]
        if found:
            mode = found[0][1].mode
            style = {"color": mode_colour(mode), "linewidth": 1.3, "marker": "o", "markersize": 3.5}
            axes.plot([x for x, _ in found], [one.speed_up for _, one in found], gid="measured", **style)
            handles.append(Line2D([], [], label=f"{mode}, measured", **style))
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.text(plan_threshold, 0.0, f" plan: {plan_threshold:g}", fontsize=7.5, color=MUTED, va="bottom")
        axes.set_xlabel("confidence threshold")
        axes.set_ylabel("speed-up over full")
        legend_above(axes, handles, columns=2)
    return figure


def _speed_caption(result: Mapping[str, Any]) -> str:
    speed = result["speed"]
    if speed is None:
        return f"{result['data']}; not measured"
    return (
        f"{speed['device']}, {words.plural(speed['threads'], 'thread')}, {speed['dtype']}; median of "
        f"{words.plural(speed['prompts'], 'prompt')} of {speed['prompt_tokens']} tokens, "
        f"{speed['new_tokens']} new"
    )
