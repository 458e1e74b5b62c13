"""Loss of every exit over training, against what a model of word frequencies alone would reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eeplan.report.palette import INK, MUTED, PAPER, exit_colours
from eeplan.report.style import house_style, legend_above, new_figure, spread

_WIDTH_IN = 6.4
Curve = Sequence[tuple[int, Mapping[str, float]]]


def loss_figure(
    train: Curve, validation: Curve, entropy_nats: float | None, names: Sequence[str], caption: str
) -> Figure:
    """Training loss as lines, validation loss as points, unigram entropy as a dashed line.

    Args:
        train: (iteration, loss in nats per name) of each logged iteration.
        validation: the same, on held-out text.
        entropy_nats: unigram entropy of the training text; None leaves the line out.
        names: losses to draw, shallowest exit first.
    """
    colours = exit_colours(names)
    with house_style():
        figure = new_figure(_WIDTH_IN, 3.6, "Loss per exit", caption)
        axes = figure.add_subplot()
        for depth, name in enumerate(names):
            style: dict[str, Any] = {"color": colours[name], "zorder": 3 + depth}
            axes.plot(
                [i for i, _ in train], [losses[name] for _, losses in train],
                linewidth=1.3, gid=f"train-{name}", **style,
            )  # fmt: skip
            axes.plot(
                [i for i, _ in validation], [losses[name] for _, losses in validation],
                linestyle="none", marker="o", markersize=5.5, markeredgecolor=PAPER, markeredgewidth=1.0,
                gid=f"validation-{name}", clip_on=False, **style,
            )  # fmt: skip
        last_iteration = max(i for i, _ in (*train, *validation))
        axes.set_xlim(0, last_iteration * 1.02)
        if entropy_nats is not None:
            axes.axhline(entropy_nats, color=MUTED, linestyle="--", linewidth=1, gid="unigram-entropy")
            axes.annotate(
                f"unigram entropy {entropy_nats:.2f}", (last_iteration, entropy_nats), xytext=(0, 3),
                textcoords="offset points", ha="right", va="bottom", fontsize=8, color=MUTED,
            )  # fmt: skip
        axes.grid(axis="y")
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats per token)")
        _label_ends(figure, train[-1][1], names, last_iteration)
        legend_above(
            axes,
            [
                Line2D([], [], color=INK, linewidth=1.3, label="training batch"),
                Line2D([], [], color=INK, linestyle="none", marker="o", markersize=5, label="validation"),
            ],
        )
    return figure


def _label_ends(figure: Figure, last: Mapping[str, float], names: Sequence[str], x: float) -> None:
    """Name each curve at its right end, moved apart where curves end close together."""
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    finite = [name for name in names if math.isfinite(last[name])]
    heights = spread([last[name] for name in finite], 0.06 * (high - low))
    colours = exit_colours(names)
    for name, height in zip(finite, heights, strict=True):
        axes.text(x * 1.03, height, f"{name}  {last[name]:.2f}", va="center", color=colours[name])
