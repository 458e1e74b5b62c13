"""Iteration time by parts, its distribution, and peak memory by parts: predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eeplan.plan import StagePlan
from eeplan.report.compare import quantile, signed_error
from eeplan.report.palette import INK, MEMORY_COLOURS, MUTED, PART_COLOURS, RULE, SOLID
from eeplan.report.style import (
    HALF_WIDTH_IN,
    house_style,
    label,
    legend_above,
    measured_fill,
    new_figure,
    predicted_fill,
)
from eeplan.report.words import seconds, signed_percent, size, size_unit, time_unit

_BAR = 0.78


def parts_figure(predicted: Mapping[str, float], measured: Mapping[str, float], caption: str) -> Figure:
    """Two stacked bars, predicted over measured.

    Args:
        predicted: seconds of each part of an iteration, named as in ``palette.PART_COLOURS``.
        measured: the same parts, medians.
    """
    totals = {"predicted": sum(predicted.values()), "measured": sum(measured.values())}
    unit, scale_s = time_unit(max(totals.values()))
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 2.5, "Iteration time by parts", caption)
        axes = figure.add_subplot()
        for row, (source, parts) in enumerate((("predicted", predicted), ("measured", measured))):
            left = 0.0
            for name, value in parts.items():
                colour = PART_COLOURS[name]
                fill = predicted_fill(colour) if source == "predicted" else measured_fill(colour, gap=False)
                bars = axes.barh(row, value / scale_s, _BAR, left=left, **fill)
                bars[0].set_gid(f"{source}-{name}")
                left += value / scale_s
            label(axes, left, row, seconds(totals[source], (unit, scale_s)))
        _rows(axes, [0, 1], ["predicted", "measured"])
        axes.set_xlim(0, max(totals.values()) / scale_s * 1.2)
        axes.set_xlabel(f"time per iteration ({unit}), medians")
        legend_above(axes, [Patch(color=colour, label=name) for name, colour in PART_COLOURS.items()])
    return figure


def distribution_figure(times_s: Sequence[float], predicted_s: float, caption: str) -> Figure:
    """Histogram of the measured iteration times, with their median, their p10 to p90, and the prediction."""
    median = statistics.median(times_s)
    low, high = quantile(times_s, 0.1), quantile(times_s, 0.9)
    unit, scale_s = time_unit(median)
    counts, edges = np.histogram(np.asarray(times_s) / scale_s, bins=_bins(len(times_s)))
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 2.5, f"Measured iterations, n = {len(times_s)}", caption)
        axes = figure.add_subplot()
        axes.axvspan(low / scale_s, high / scale_s, color=RULE, alpha=0.45, linewidth=0, gid="p10-p90")
        bars = axes.bar(edges[:-1], counts, np.diff(edges), align="edge", **measured_fill(SOLID))
        for index, bar in enumerate(bars):
            bar.set_gid(f"count-{index}")
        axes.axvline(median / scale_s, color=INK, linewidth=1.2, gid="median")
        axes.axvline(predicted_s / scale_s, color=INK, linewidth=1.2, linestyle="--", gid="predicted")
        axes.set_ylim(0, max(counts) * 1.12)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.set_xlabel(f"iteration time ({unit})")
        axes.set_ylabel("iterations")
        handles = [
            Line2D([], [], color=INK, linestyle="--", label="predicted"),
            Line2D([], [], color=INK, label="median"),
            Patch(color=RULE, alpha=0.45, label="p10 to p90"),
        ]
        legend_above(axes, handles)
    return figure


def _bins(count: int) -> int:
    """Square-root rule, within what a column's width can show."""
    return int(min(30, max(5, round(count**0.5) * 2)))


def memory_figure(
    stages: Sequence[StagePlan], measured_bytes: Sequence[int], limit_bytes: int | None, caption: str
) -> Figure:
    """Two bars per stage: predicted peak, stacked by what the bytes are, over the measured peak.

    Args:
        measured_bytes: measured peak of each stage.
        limit_bytes: device memory that the plan had to respect, drawn as a line; None for no limit.
    """
    peaks = [stage.memory.peak_bytes for stage in stages]
    top = max(*peaks, *measured_bytes)
    unit, scale = size_unit(top)
    with house_style():
        figure = new_figure(HALF_WIDTH_IN, 1.15 + 0.62 * len(stages), "Peak memory per stage", caption)
        axes = figure.add_subplot()
        ticks, labels = [], []
        for index, (stage, measured) in enumerate(zip(stages, measured_bytes, strict=True)):
            y = index * 2.4
            left = 0.0
            memory = stage.memory
            parts = (memory.state_bytes, memory.activation_bytes, memory.transient_bytes)
            for (name, colour), value in zip(MEMORY_COLOURS.items(), parts, strict=True):
                bars = axes.barh(y, value / scale, _BAR, left=left, **predicted_fill(colour))
                bars[0].set_gid(f"predicted-{index}-{name}")
                left += value / scale
            bars = axes.barh(y + 0.9, measured / scale, _BAR, **measured_fill(SOLID))
            bars[0].set_gid(f"measured-{index}")
            error = signed_percent(signed_error(memory.peak_bytes, measured))
            label(axes, left, y, f"{size(memory.peak_bytes, (unit, scale))}\u2002{error}")
            label(axes, measured / scale, y + 0.9, size(measured, (unit, scale)))
            ticks += [y, y + 0.9]
            labels += [f"stage {index}\u2003predicted", "measured"]
        _rows(axes, ticks, labels)
        axes.set_xlim(0, top / scale * 1.42)
        if limit_bytes is not None and limit_bytes < top * 1.42:
            axes.axvline(limit_bytes / scale, color=INK, linestyle=":", gid="limit")
            axes.text(limit_bytes / scale, -0.75, " device limit", fontsize=7.5, color=MUTED)
        axes.set_xlabel(f"bytes at the peak ({unit})")
        handles = [Patch(color=colour, label=name) for name, colour in MEMORY_COLOURS.items()]
        legend_above(axes, [*handles, Patch(color=SOLID, label="measured")])
    return figure


def _rows(axes: Axes, positions: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_yticks(list(positions))
    axes.set_yticklabels(list(labels))
    axes.set_ylim(max(positions) + 0.55, min(positions) - 0.55)
