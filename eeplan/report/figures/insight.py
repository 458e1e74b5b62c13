"""Where a stage's time goes when it does not compute, and what the pipeline's time hangs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from eeplan.plan import Plan
from eeplan.report.insights import parts_of_path
from eeplan.report.palette import PHASE_COLOURS, SOLID, exit_colours
from eeplan.report.style import (
    HALF_WIDTH_IN,
    house_style,
    label,
    legend_above,
    measured_fill,
    new_figure,
    predicted_fill,
)
from eeplan.report.words import percent, seconds, time_unit, times

_BAR = 0.78
Phases = Mapping[str, float]
"""Idle seconds by phase: ``warm-up``, ``steady``, ``cool-down``."""


def idle_figure(predicted: Sequence[Phases], measured: Sequence[Phases], caption: str) -> Figure:
    """Two bars per stage, idle time stacked by phase, predicted over measured.

    Args:
        predicted: of each stage.
        measured: of each stage, medians over the recorded iterations.
    """
    totals = [sum(phases.values()) for phases in (*predicted, *measured)]
    unit, scale_s = time_unit(max(totals) or 1.0)
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 1.15 + 0.62 * len(predicted), "Idle time per stage", caption)
        axes = figure.add_subplot()
        ticks, labels = [], []
        for index, pair in enumerate(zip(predicted, measured, strict=True)):
            for row, (source, phases) in enumerate(zip(("predicted", "measured"), pair, strict=True)):
                y, left = index * 2.4 + 0.9 * row, 0.0
                for name, colour in PHASE_COLOURS.items():
                    fill = predicted_fill(colour) if row == 0 else measured_fill(colour, gap=False)
                    bars = axes.barh(y, phases[name] / scale_s, _BAR, left=left, **fill)
                    bars[0].set_gid(f"{source}-{index}-{name}")
                    left += phases[name] / scale_s
                label(axes, left, y, seconds(sum(phases.values()), (unit, scale_s)))
                ticks.append(y)
                labels.append(f"stage {index}\u2003predicted" if row == 0 else "measured")
        axes.set_yticks(ticks)
        axes.set_yticklabels(labels)
        axes.set_ylim(max(ticks) + 0.55, -0.55)
        axes.set_xlim(0, (max(totals) or 1.0) / scale_s * 1.25)
        axes.set_xlabel(f"idle in the pipeline part ({unit})")
        legend_above(axes, [Patch(color=colour, label=name) for name, colour in PHASE_COLOURS.items()])
    return figure


def path_figure(plan: Plan, caption: str) -> Figure:
    """What one critical path consists of, op by op; the bars add up to the pipeline part.

    The counts say by how much the iteration answers to the op's forward and backward.
    """
    parts = parts_of_path(plan)
    depths = [part.name for part in parts if part.name.startswith("exit_")]
    colours = exit_colours([*depths, "final_head"])
    unit, scale_s = time_unit(max(part.critical_s for part in parts) or 1.0)
    most = (max(part.critical_s for part in parts) or 1.0) / scale_s
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 1.0 + 0.27 * len(parts), "What the time hangs on", caption)
        axes = figure.add_subplot()
        for row, part in enumerate(parts):
            fill = predicted_fill(colours.get(part.name, SOLID))
            bars = axes.barh(row, part.critical_s / scale_s, _BAR, **fill)
            bars[0].set_gid(f"path-{part.name}")
            note = percent(part.share)
            if part.forward is not None and part.backward is not None:
                note += f"\u2002{times(part.forward)} F, {times(part.backward)} B"
            label(axes, part.critical_s / scale_s, row, note)
        axes.set_yticks(range(len(parts)))
        axes.set_yticklabels([part.name.replace("_", " ") for part in parts])
        axes.set_ylim(len(parts) - 0.45, -0.55)
        axes.set_xlim(0, most * 1.6)
        axes.set_xlabel(f"time on the critical path ({unit}), predicted")
    return figure
