"""What exits are worth: how often tokens leave at each threshold, and whether confidence can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eeplan.report.evaluations import Worth
from eeplan.report.palette import INK, MUTED, PAPER, exit_colours
from eeplan.report.style import HALF_WIDTH_IN, house_style, legend_above, new_figure

_HEIGHT_IN = 3.6


def usage_figure(worth: Worth, names: Sequence[str], threshold: float, caption: str) -> Figure:
    """Share of tokens that leave at each exit by threshold, stacked, and agreement with the full model.

    Args:
        names: of the exits by depth, the final one last.
        threshold: that the plan decodes with, marked.
    """
    points = sorted(worth.thresholds, key=lambda point: point.threshold)
    at = [point.threshold for point in points]
    colours = exit_colours(names)
    with house_style():
        figure = new_figure(
            HALF_WIDTH_IN, _HEIGHT_IN, f"Where {worth.num_tokens:,} tokens leave, by threshold", caption
        )
        axes = figure.add_subplot()
        below = [0.0] * len(points)
        for index, name in enumerate(names[:-1]):
            top = [low + point.exit_shares[index] for low, point in zip(below, points, strict=True)]
            area = axes.fill_between(at, below, top, color=colours[name], alpha=0.75, linewidth=0)
            area.set_gid(f"share-{name}")
            below = top
        agreement = [point.agreement_with_final for point in points]
        axes.plot(at, agreement, color=INK, linewidth=1.6, gid="agreement")
        axes.axvline(threshold, color=MUTED, linestyle=":", linewidth=1, gid="threshold")
        # Half way up, between the shares below and the agreement above.
        axes.text(threshold, 0.5, f" plan: {threshold:g}", fontsize=7.5, color=MUTED, va="center")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.grid(axis="y")
        axes.set_xlabel("confidence threshold")
        axes.set_ylabel("share of tokens")
        handles: list[Patch | Line2D] = [Patch(color=colours[name], label=name) for name in names[:-1]]
        handles.append(Line2D([], [], color=INK, linewidth=1.6, label="same token as the final exit"))
        legend_above(axes, handles)
    return figure


def reliability_figure(worth: Worth, names: Sequence[str], caption: str) -> Figure:
    """How often each exit is right, by the probability that it gives; on the diagonal if that can be trusted.

    Bins with more tokens have larger marks (Guo et al. 2017, 2).
    """
    colours = exit_colours(names)
    with house_style():
        figure = new_figure(
            HALF_WIDTH_IN, _HEIGHT_IN, f"Calibration of every exit, {worth.num_tokens:,} tokens", caption
        )
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, gid="diagonal")
        handles = []
        for name in names:
            head = worth.exits[name]
            x = [one.mean_probability for one in head.reliability]
            y = [one.accuracy for one in head.reliability]
            sizes = [6 + 60 * one.tokens / worth.num_tokens for one in head.reliability]
            axes.plot(x, y, color=colours[name], linewidth=1.2, gid=f"line-{name}")
            marks = axes.scatter(
                x, y, s=sizes, color=colours[name], edgecolors=PAPER, linewidths=0.5, zorder=3
            )
            marks.set_gid(f"bins-{name}")
            text = f"{name} ({head.calibration_error:.3f})"
            handles.append(Line2D([], [], color=colours[name], marker="o", markersize=4, label=text))
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.grid(axis="y")
        axes.set_xlabel("probability of the most likely token")
        axes.set_ylabel("share of tokens where it is right")
        legend_above(axes, handles, columns=min(3, len(handles)))
    return figure
