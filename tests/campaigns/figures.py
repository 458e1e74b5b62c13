"""Pictures of the campaigns' numbers, in the report's style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from campaigns.convergence import Curve
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from eeplan.report.palette import INK, MUTED, exit_colours
from eeplan.report.style import house_style, new_figure


def convergence_figure(curves: Sequence[Curve], caption: str) -> Figure:
    """Loss of every head over iterations, each seed a thin line; dashed in ink without exits."""
    heads = list(dict.fromkeys(curve.head for curve in curves if curve.num_exits))
    colours = exit_colours(heads)
    with house_style():
        figure = new_figure(6.4, 3.8, "Loss with planned exits, and without", caption)
        axes = figure.add_subplot()
        named = set()
        for curve in curves:
            label = curve.head if curve.num_exits else "final, no exits"
            steps, losses = zip(*curve.training, strict=True)
            axes.plot(
                steps, losses, linewidth=1.1,
                color=colours[curve.head] if curve.num_exits else INK,
                linestyle="-" if curve.num_exits else (0, (4, 2)), zorder=2 if curve.num_exits else 3,
                label=None if label in named else label,
            )  # fmt: skip
            named.add(label)
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats per token)")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(2, 3, 4, 5, 6, 7)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y")
        axes.legend(loc="upper right")
    return figure


def prediction_figure(results: Sequence[dict[str, Any]], caption: str) -> Figure:
    """Measured against predicted iteration time, and the signed error of each run below.

    Groups have a colour and, as there are more groups than colours, a marker for the first and second half.
    """
    groups = list(dict.fromkeys(result["group"] for result in results))
    with house_style():
        figure = new_figure(6.4, 4.8, "Iteration time: predicted and measured", caption)
        above, below = figure.subplots(2, 1, height_ratios=(2, 1))
        half = -(-len(groups) // 2)
        colours = list(exit_colours(groups[:half]).values())
        for index, group in enumerate(groups):
            colour, marker = colours[index % half], "os"[index // half]
            mine = [result for result in results if result["group"] == group]
            x = [result["measured_iteration_s"] for result in mine]
            above.plot(
                x, [result["predicted_iteration_s"] for result in mine], marker, markersize=4.5, color=colour,
                label=group,
            )  # fmt: skip
            below.plot(
                x, [100 * result["iteration_error"] for result in mine], marker, markersize=4, color=colour
            )
        ends = [f([r["measured_iteration_s"] for r in results]) for f in (min, max)]
        above.plot(ends, ends, color=MUTED, linewidth=0.8, zorder=1)
        for axes in (above, below):
            axes.set_xscale("log")
            axes.grid(axis="y")
        above.set_yscale("log")
        for axis in (above.xaxis, above.yaxis, below.xaxis):
            axis.set_major_locator(LogLocator(base=10, subs=(1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        above.set_ylabel("predicted (s)")
        above.legend(fontsize=6.5, ncols=2)
        below.axhline(0, color=MUTED, linewidth=0.8)
        below.set_ylabel("error (%)")
        below.set_xlabel("measured (s)")
    return figure
