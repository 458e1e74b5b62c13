"""The planned model as a strip: layers by stage, and where each exit leaves."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eeplan.plan import Plan
from eeplan.report.palette import INK, MUTED, RULE, exit_colours
from eeplan.report.rundir import loss_names
from eeplan.report.style import WIDTH_IN, house_style, new_figure

_STAGE_GAP = 0.35
_FLAG_STEP = 0.75


def layout_figure(plan: Plan, caption: str) -> Figure:
    """One box per layer, stages apart, a flag at each exit with its head and loss weight."""
    names = loss_names(plan)
    colours = exit_colours(names)
    flags = [
        (e.depth, f"exit_{e.depth}", f"{e.head} head, weight {e.effective_weight:.2g}")
        for e in sorted(plan.exits, key=lambda e: e.depth)
    ]
    flags.append((plan.run.model.num_layers, "final", f"weight {plan.final_exit_weight:.2g}"))
    rows = _stagger([_right_edge(plan, depth) for depth, _, _ in flags], _right_edge(plan, flags[-1][0]))
    with house_style():
        figure = new_figure(WIDTH_IN, 1.25 + 0.24 * max(rows), "Layers, stages and exits", caption)
        axes = figure.add_subplot()
        for index, stage in enumerate(plan.stages):
            for layer in range(stage.first_layer, stage.last_layer + 1):
                left = layer - 1 + index * _STAGE_GAP
                box = Rectangle((left + 0.03, 0), 0.94, 1, facecolor=RULE, linewidth=0, gid=f"layer-{layer}")
                axes.add_patch(box)
                if plan.run.model.num_layers <= 48:
                    axes.text(
                        left + 0.5, 0.5, str(layer), ha="center", va="center", fontsize=7.5, color=MUTED
                    )
            axes.text(
                stage.first_layer - 1 + index * _STAGE_GAP + 0.03, 1.25, f"stage {index}",
                va="top", fontweight="bold", color=INK,
            )  # fmt: skip
        for (depth, name, note), row in zip(flags, rows, strict=True):
            x, top = _right_edge(plan, depth), -0.35 - _FLAG_STEP * row
            axes.plot([x, x], [1, top], color=colours[name], linewidth=2.2, gid=f"flag-{name}")
            axes.text(x - 0.12, top + 0.1, f"{name}  {note}", ha="right", va="center", fontsize=8, color=INK)
        axes.set_xlim(-0.1, _right_edge(plan, plan.run.model.num_layers) + 0.1)
        axes.set_ylim(1.9, -0.7 - _FLAG_STEP * max(rows))
        axes.axis("off")
    return figure


def _right_edge(plan: Plan, depth: int) -> float:
    """Where the box of layer ``depth`` ends."""
    stage = next(i for i, s in enumerate(plan.stages) if s.first_layer <= depth <= s.last_layer)
    return depth + stage * _STAGE_GAP


def _stagger(positions: Sequence[float], width: float) -> list[int]:
    """Row of each flag: labels that end within a quarter of the width of each other get rows of their own."""
    rows: list[int] = []
    for index, x in enumerate(positions):
        close = {rows[j] for j in range(index) if x - positions[j] < 0.25 * width}
        rows.append(next(row for row in range(len(positions)) if row not in close))
    return rows
