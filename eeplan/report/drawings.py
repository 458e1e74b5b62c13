"""Draws all figures of a report, each as a PNG file and as SVG for the page."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from eeplan.report.compare import idle_phases, measured_parts, predicted_parts
from eeplan.report.figures.bars import distribution_figure, memory_figure, parts_figure
from eeplan.report.figures.exits import reliability_figure, usage_figure
from eeplan.report.figures.insight import idle_figure, path_figure
from eeplan.report.figures.layout import layout_figure
from eeplan.report.figures.losses import loss_figure
from eeplan.report.figures.timeline import timeline_figure
from eeplan.report.rundir import RunData
from eeplan.report.style import inline_svg, png
from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.critical_path import critical_path, event_graph
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of
from eeplan.timeline import Message, Span, Timeline


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure in its two forms."""

    png: bytes
    svg: str


def figures(
    run: RunData, predicted: Timeline, measured: Timeline, measured_s: float, caption: str
) -> dict[str, Figure]:
    """All figures by name; the names are those of their PNG files.

    Args:
        predicted: the simulated iteration.
        measured: the iteration to show beside it, which took ``measured_s`` seconds.
        caption: hardware and batch, for the foot of each figure.
    """
    plan = run.plan
    train = [(record.iteration, record.losses) for record in run.train]
    validation = [(record.iteration, record.losses) for record in run.validation]
    ends_s = (plan.prediction.iteration_time_s, measured_s)
    drawn = {
        "timeline": timeline_figure(predicted, measured, ends_s, caption, planned_path(run)),
        "iteration_time": parts_figure(predicted_parts(run), measured_parts(run), caption),
        "iteration_distribution": distribution_figure(
            run.measured.iteration_times_s, plan.prediction.iteration_time_s, caption
        ),
        "memory": memory_figure(
            plan.stages, run.measured.peak_bytes, plan.run.limits.device_memory_bytes, caption
        ),
        "losses": loss_figure(train, validation, run.unigram_entropy_nats, run.loss_names, caption),
        "layout": layout_figure(plan, caption),
        "idle": idle_figure(*idle_phases(run), caption),
        "critical_path": path_figure(plan, caption),
    }
    if run.evaluation is not None:
        threshold = plan.run.decode.threshold
        if plan.exits:
            drawn["usage"] = usage_figure(run.evaluation, run.loss_names, threshold, caption)
        drawn["reliability"] = reliability_figure(run.evaluation, run.loss_names, caption)
    return drawn


def planned_path(run: RunData) -> tuple[Span | Message, ...]:
    """A critical path of the predicted pipeline part."""
    schedule, costs = schedule_of(run.plan), pipeline_costs_of(run.plan)
    return critical_path(event_graph(schedule, simulate(schedule, costs), costs.transport))


def draw(
    run: RunData, predicted: Timeline, measured: Timeline, measured_s: float, caption: str
) -> dict[str, Drawing]:
    """:func:`figures`, rendered."""
    return {
        name: Drawing(png=png(figure), svg=inline_svg(figure, name, f"{figure.get_suptitle()}. {caption}"))
        for name, figure in figures(run, predicted, measured, measured_s, caption).items()
    }
