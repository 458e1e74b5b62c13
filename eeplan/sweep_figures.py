"""Figures of a sweep: time, memory and decode latency over each axis of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from eeplan.files import write_bytes
from eeplan.report.palette import EXIT_COLOURS, INK, PAPER
from eeplan.report.style import WIDTH_IN, house_style, legend_above, new_figure, png
from eeplan.report.words import size_unit, time_unit
from eeplan.sweep_axes import Axis

if TYPE_CHECKING:
    import pandas as pd

_DECODE_MODES = ("decode_full_s", "decode_kv_recompute_s", "decode_catch_up_s", "decode_pipeline_s")
_UnitOf = Callable[[float], tuple[str, float]]
WIDE, MOST_TICKS = 16, 8
"""Ratio from which an axis is logarithmic, and values that fit below it."""
MOST_LINES = 6
"""As many hues as can be told apart."""


def write_figures(table: pd.DataFrame, axes: Sequence[Axis], folder: Path, caption: str) -> list[Path]:
    """Draw the sweep into ``folder``, one PNG per axis with at least two numbers.

    Returns:
        The files written, named after the axes.

    Raises:
        FileError: the folder cannot be written.
    """
    written = []
    for axis in axes:
        if len(_numbers(axis)) >= 2 and table["feasible"].any():
            path = folder / f"{axis.key}.png"
            write_bytes(path, png(axis_figure(table, axis, _lines_of(axis, axes), caption)))
            written.append(path)
    return written


def axis_figure(table: pd.DataFrame, axis: Axis, lines: Axis | None, caption: str) -> Figure:
    """Iteration time, peak memory and, where it was predicted, decode latency over one axis.

    Args:
        table: of :func:`eeplan.sweep.sweep`.
        axis: along the bottom.
        lines: one line for each of its values; None draws one line.
        caption: device and batch.

    Each point is the least of all feasible rows that it stands for, so that axes not drawn are at their best.
    """
    feasible = table[table["feasible"]]
    columns: list[tuple[str, str, _UnitOf]] = [
        ("iteration_time_s", "iteration time", time_unit),
        ("peak_bytes", "peak memory", size_unit),
    ]
    what = "Time and memory"
    if feasible["decode_full_s"].notna().any():
        # Every mode gives the same tokens, so the fastest is what counts.
        feasible = feasible.assign(decode_s=feasible[list(_DECODE_MODES)].min(axis=1))
        columns.append(("decode_s", "per token, fastest mode", time_unit))
        what = "Time, memory and decode latency"
    names = [None] if lines is None else list(lines.values)
    with house_style():
        by = "" if lines is None else f", one line per {lines.key}"
        figure = new_figure(WIDTH_IN, 3.6, f"{what} over {axis.key}{by}", caption)
        handles = []
        for panel, (column, title, unit_of) in enumerate(columns, start=1):
            plot = figure.add_subplot(1, len(columns), panel)
            unit, scale = unit_of(float(feasible[column].median()))
            for number, name in enumerate(names):
                colour = INK if lines is None else EXIT_COLOURS[number % len(EXIT_COLOURS)]
                points = list(_points(feasible, axis, lines, name, column))
                style: dict[str, Any] = {"color": colour, "marker": "o", "markeredgecolor": PAPER}
                plot.plot(
                    [x for x, _ in points], [y / scale for _, y in points],
                    markersize=4.5, linewidth=1.3, gid=f"{column}-{name}", **style,
                )  # fmt: skip
                if panel == 1 and lines is not None:
                    handles.append(Line2D([], [], label=str(name), **style))
            _ticks(plot, _numbers(axis))
            plot.set_xlabel(axis.key)
            plot.set_ylabel(f"{title} ({unit})")
            plot.set_ylim(bottom=0)
            plot.grid(axis="y")
        if handles:
            legend_above(figure.axes[0], handles)
    return figure


def _ticks(plot: Axes, values: Sequence[float]) -> None:
    """Whole numbers for whole numbers; equal steps for equal ratios where values span many."""
    if values[0] > 0 and values[-1] >= WIDE * values[0]:
        plot.set_xscale("log")
        plot.set_xticks(values if len(values) <= MOST_TICKS else [values[0], values[-1]])
        plot.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plot.xaxis.set_minor_locator(NullLocator())
    elif all(isinstance(value, int) for value in values):
        plot.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _points(
    feasible: pd.DataFrame, axis: Axis, lines: Axis | None, name: Any, column: str
) -> Iterator[tuple[float, float]]:
    rows = feasible if lines is None else feasible[feasible[lines.key] == name]
    least = rows.groupby(axis.key)[column].min()
    for x in _numbers(axis):
        if x in least.index:
            yield x, float(least.loc[x])


def _numbers(axis: Axis) -> list[Any]:
    return sorted({value for value in axis.values if type(value) in (int, float)})


def _lines_of(axis: Axis, axes: Sequence[Axis]) -> Axis | None:
    """The other axis with the most values that still can be told apart."""
    others = [
        other
        for other in axes
        if other is not axis
        and 2 <= len(other.values) <= MOST_LINES
        and not any(isinstance(value, list | dict) for value in other.values)
    ]
    return max(others, key=lambda other: len(other.values), default=None)
