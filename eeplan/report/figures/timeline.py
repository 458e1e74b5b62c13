"""Predicted and measured timelines on one time axis, stage by stage, op over op."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eeplan.report.palette import INK, KIND_COLOURS, KIND_NAMES, MUTED, ON_BAR, SOLID, VERMILLION
from eeplan.report.style import (
    WIDTH_IN,
    house_style,
    legend_above,
    measured_fill,
    new_figure,
    predicted_fill,
)
from eeplan.report.words import seconds, time_unit
from eeplan.timeline import Message, Span, Timeline

ROW, PAIR = 1.0, 2.45
"""Height of a row, and distance between the rows of one stage and the next, in axis units."""
_BAR = 0.9
_ROW_IN, _FRAME_IN = 0.27, 1.2
_MARGIN_IN = 1.3
"""Of the figure's width, taken by row labels; only used to judge which numbers fit."""


def timeline_figure(
    predicted: Timeline,
    measured: Timeline,
    ends_s: tuple[float, float],
    caption: str,
    path: Sequence[Span | Message] = (),
) -> Figure:
    """Two rows per stage: the simulated iteration hatched, the measured one solid below it.

    Args:
        ends_s: end of the predicted and of the measured iteration in seconds, overhead included.
        path: critical path of the predicted one, drawn below its ops and from stage to stage.
    """
    unit, scale_s = time_unit(max(ends_s))
    stages = predicted.num_stages
    height = _FRAME_IN + stages * PAIR * _ROW_IN
    with house_style():
        figure = new_figure(WIDTH_IN, height, "One iteration, predicted and measured", caption)
        axes = figure.add_subplot()
        axes.set_xlim(0, 1.01 * max(*ends_s, predicted.end_ns / 1e9, measured.end_ns / 1e9) / scale_s)
        axes.set_ylim(stages * PAIR - (PAIR - 2 * ROW) + 0.1, -0.55)
        for stage in range(stages):
            _draw_row(axes, predicted.spans[stage], "predicted", stage * PAIR, scale_s)
            _draw_row(axes, measured.spans[stage], "measured", stage * PAIR + ROW, scale_s)
            axes.text(
                -0.078, stage * PAIR + ROW, f"stage {stage}", transform=axes.get_yaxis_transform(),
                ha="right", va="center", color=INK, fontweight="bold",
            )  # fmt: skip
        if path:
            _draw_path(axes, path, scale_s)
        axes.set_yticks([s * PAIR + r * ROW + ROW / 2 for s in range(stages) for r in (0, 1)])
        axes.set_yticklabels(["predicted", "measured"] * stages)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"time since the start of the iteration ({unit})")
        _mark_ends(axes, ends_s, scale_s)
        shown = {s.kind for t in (predicted, measured) for stage in t.spans for s in stage}
        handles: list[Patch | Line2D] = [
            Patch(color=KIND_COLOURS[k], label=KIND_NAMES[k]) for k in KIND_COLOURS if k in shown
        ]
        handles.append(Patch(**predicted_fill(SOLID), label="predicted"))
        handles.append(Patch(**measured_fill(SOLID), label="measured"))
        if path:
            handles.append(Line2D([], [], color=VERMILLION, linewidth=1.8, label="critical path"))
        legend_above(axes, handles)
    return figure


def _draw_row(axes: Axes, spans: tuple[Span, ...], source: str, top: float, scale_s: float) -> None:
    for kind, colour in KIND_COLOURS.items():
        bars = [
            (span.start_ns / 1e9 / scale_s, (span.end_ns - span.start_ns) / 1e9 / scale_s)
            for span in spans
            if span.kind == kind
        ]
        if bars:
            fill = predicted_fill(colour) if source == "predicted" else measured_fill(colour)
            collection = axes.broken_barh(bars, (top + (ROW - _BAR) / 2, _BAR), **fill)
            collection.set_gid(f"{source}-{spans[0].stage}-{kind}")
    for span in spans:
        if span.microbatch >= 0 and _fits(axes, span, scale_s):
            axes.text(
                (span.start_ns + span.end_ns) / 2e9 / scale_s, top + ROW / 2 + 0.03, str(span.microbatch),
                ha="center", va="center", fontsize=7.5, clip_on=True,
                color=INK if source == "predicted" else ON_BAR,
            )  # fmt: skip


def _draw_path(axes: Axes, path: Sequence[Span | Message], scale_s: float) -> None:
    """One line along the bottom of the predicted rows; messages lead from one stage's to another's."""
    xs, ys = [], []
    for node in path:
        if isinstance(node, Message):
            points = ((node.send_ns, node.source), (node.receive_ns, node.target))
        else:
            points = ((node.start_ns, node.stage), (node.end_ns, node.stage))
        xs += [time_ns / 1e9 / scale_s for time_ns, _ in points]
        ys += [stage * PAIR + ROW - 0.04 for _, stage in points]
    axes.plot(xs, ys, color=VERMILLION, linewidth=1.4, solid_joinstyle="round", zorder=4, gid="critical-path")


def _fits(axes: Axes, span: Span, scale_s: float) -> bool:
    """Whether the microbatch's number is narrower than its bar."""
    points_per_unit = (WIDTH_IN - _MARGIN_IN) * 72 / axes.get_xlim()[1]
    width_pt = (span.end_ns - span.start_ns) / 1e9 / scale_s * points_per_unit
    return width_pt > 2 + 5.5 * len(str(span.microbatch))


def _mark_ends(axes: Axes, ends_s: tuple[float, float], scale_s: float) -> None:
    """A line where each iteration ends; the later one's label stands above the other's."""
    later = ends_s.index(max(ends_s))
    for index, (source, line) in enumerate((("predicted", "--"), ("measured", "-"))):
        x = ends_s[index] / scale_s
        axes.axvline(x, color=INK, linestyle=line, linewidth=0.9, gid=f"{source}-end")
        row = -0.3 if index != later else -1.05
        axes.annotate(
            f"{source} end {seconds(ends_s[index])}", (x, row), xytext=(-4 if index != later else 0, 0),
            textcoords="offset points", ha="right", va="center", fontsize=7.5, color=MUTED,
            annotation_clip=False,
        )  # fmt: skip
