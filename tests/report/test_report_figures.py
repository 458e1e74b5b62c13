"""The figures show the data: spans, bars, lines and marks are read back from the axes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from fake_run import Reported
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from eeplan.report.compare import measured_parts, predicted_parts, predicted_timeline
from eeplan.report.drawings import figures
from eeplan.report.figures.bars import memory_figure
from eeplan.report.figures.losses import loss_figure
from eeplan.report.palette import KIND_COLOURS, exit_colours
from eeplan.report.style import spread
from eeplan.timeline import Timeline

CAPTION = "a machine, 2 cores; 6 microbatches of 2 × 32 tokens"
Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def drawn(reported: Reported) -> dict[str, Figure]:
    _, measured, duration_s = reported.run.median_iteration
    return figures(reported.run, predicted_timeline(reported.plan), measured, duration_s, CAPTION)


def collections(axes: Axes) -> Iterator[tuple[str, PolyCollection]]:
    for child in axes.collections:
        if isinstance(child, PolyCollection) and child.get_gid():
            yield str(child.get_gid()), child


def boxes(collection: PolyCollection) -> list[Box]:
    """(left, right, top, bottom) of each rectangle."""
    corners = [path.vertices for path in collection.get_paths()]
    return [(*_range(c[:, 0]), *_range(c[:, 1])) for c in map(np.asarray, corners)]


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def bars(axes: Axes) -> dict[str, Rectangle]:
    return {str(p.get_gid()): p for p in axes.patches if isinstance(p, Rectangle) and p.get_gid()}


def lines(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_gid()): line for line in axes.lines if line.get_gid()}


def span_edges(figure: Figure, source: str, stage: int, kind: str) -> list[tuple[float, float]]:
    found = dict(collections(figure.axes[0])).get(f"{source}-{stage}-{kind}")
    return [] if found is None else [(left, right) for left, right, _, _ in boxes(found)]


def check_spans(figure: Figure, source: str, timeline: Timeline, unit_s: float) -> None:
    for stage, spans in enumerate(timeline.spans):
        for kind in KIND_COLOURS:
            expected = [(s.start_ns / 1e9 / unit_s, s.end_ns / 1e9 / unit_s) for s in spans if s.kind == kind]
            found = span_edges(figure, source, stage, kind)
            assert len(found) == len(expected)
            assert np.allclose(found, expected)


def test_both_timelines_are_drawn_span_by_span(drawn: dict[str, Figure], reported: Reported) -> None:
    _, measured, duration_s = reported.run.median_iteration
    check_spans(drawn["timeline"], "predicted", predicted_timeline(reported.plan), 1e-3)
    check_spans(drawn["timeline"], "measured", measured, 1e-3)
    ends = lines(drawn["timeline"].axes[0])
    assert ends["measured-end"].get_xdata()[0] == pytest.approx(duration_s * 1e3)
    predicted_end = reported.plan.prediction.iteration_time_s * 1e3
    assert ends["predicted-end"].get_xdata()[0] == pytest.approx(predicted_end)


def test_a_timeline_of_another_iteration_would_be_noticed(
    drawn: dict[str, Figure], reported: Reported
) -> None:
    shown, measured, _ = reported.run.median_iteration
    other = next(timeline for number, timeline in reported.run.timelines if number != shown)
    with pytest.raises(AssertionError):
        check_spans(drawn["timeline"], "measured", other, 1e-3)
    with pytest.raises(AssertionError):
        check_spans(drawn["timeline"], "predicted", measured, 1e-3)


def test_predicted_is_hatched_and_measured_solid(drawn: dict[str, Figure]) -> None:
    for gid, collection in collections(drawn["timeline"].axes[0]):
        source, _, kind = gid.split("-")
        assert bool(collection.get_hatch()) == (source == "predicted")
        face = collection.get_facecolor()[0]
        assert to_hex(face) == KIND_COLOURS[kind]
        assert (face[3] == 1.0) == (source == "measured")
    for name in ("iteration_time", "memory"):
        for gid, bar in bars(drawn[name].axes[0]).items():
            assert bool(bar.get_hatch()) == gid.startswith("predicted")


def test_rows_of_a_stage_share_an_axis_and_do_not_overlap(drawn: dict[str, Figure]) -> None:
    assert len(drawn["timeline"].axes) == 1
    rows: dict[str, tuple[float, float]] = {}
    for gid, collection in collections(drawn["timeline"].axes[0]):
        for _, _, top, bottom in boxes(collection):
            assert rows.setdefault("-".join(gid.split("-")[:2]), (top, bottom)) == (top, bottom)
    ordered = [rows[f"{source}-{stage}"] for stage in range(3) for source in ("predicted", "measured")]
    assert all(above[1] < below[0] for above, below in pairwise(ordered))


def test_numbers_stand_in_the_bars_of_their_microbatch(drawn: dict[str, Figure], reported: Reported) -> None:
    axes = drawn["timeline"].axes[0]
    numbers = [(t.get_position()[0], t.get_text()) for t in axes.texts if t.get_text().isdigit()]
    assert numbers
    _, measured, _ = reported.run.median_iteration
    spans = [s for t in (predicted_timeline(reported.plan), measured) for stage in t.spans for s in stage]
    for x, text in numbers:
        middles = [(s.start_ns + s.end_ns) / 2e6 for s in spans if str(s.microbatch) == text]
        assert min(abs(x - middle) for middle in middles) < 1e-6


def test_parts_are_stacked_to_the_iteration(drawn: dict[str, Figure], reported: Reported) -> None:
    found = bars(drawn["iteration_time"].axes[0])
    for source, parts in (
        ("predicted", predicted_parts(reported.run)),
        ("measured", measured_parts(reported.run)),
    ):
        left = 0.0
        for name, value_s in parts.items():
            bar = found[f"{source}-{name}"]
            assert bar.get_x() == pytest.approx(left)
            assert bar.get_width() == pytest.approx(value_s * 1e3)
            left += bar.get_width()
    assert sum(predicted_parts(reported.run).values()) == pytest.approx(
        reported.plan.prediction.iteration_time_s
    )


def test_the_distribution_counts_every_iteration_once(drawn: dict[str, Figure], reported: Reported) -> None:
    axes = drawn["iteration_distribution"].axes[0]
    counts = [p for p in axes.patches if str(p.get_gid()).startswith("count-")]
    times = np.array(reported.run.measured.iteration_times_s) * 1e3
    assert sum(bar.get_height() for bar in counts) == len(times) == 25
    last = counts[-1]
    for bar in counts:
        left, right = bar.get_x(), bar.get_x() + bar.get_width()
        inside = (times >= left) & ((times < right) if bar is not last else (times <= right + 1e-9))
        assert bar.get_height() == inside.sum()
    marks = lines(axes)
    assert marks["median"].get_xdata()[0] == pytest.approx(float(np.median(times)))
    assert marks["predicted"].get_xdata()[0] == pytest.approx(reported.plan.prediction.iteration_time_s * 1e3)


def test_memory_bars_are_the_breakdown_and_the_measured_peaks(
    drawn: dict[str, Figure], reported: Reported
) -> None:
    found = bars(drawn["memory"].axes[0])
    for index, stage in enumerate(reported.plan.stages):
        memory, left = stage.memory, 0.0
        for name, value in (
            ("state", memory.state_bytes),
            ("activations", memory.activation_bytes),
            ("transient", memory.transient_bytes),
        ):
            bar = found[f"predicted-{index}-{name}"]
            assert (bar.get_x(), bar.get_width()) == pytest.approx((left, value / 2**20))
            left += bar.get_width()
        assert left == pytest.approx(memory.peak_bytes / 2**20)
        measured = found[f"measured-{index}"]
        assert measured.get_width() == pytest.approx(reported.run.measured.peak_bytes[index] / 2**20)


def test_a_device_limit_in_sight_is_drawn(reported: Reported) -> None:
    peaks = reported.run.measured.peak_bytes
    near = memory_figure(reported.plan.stages, peaks, 100 * 2**20, CAPTION)
    assert lines(near.axes[0])["limit"].get_xdata()[0] == pytest.approx(100)
    assert "limit" not in lines(memory_figure(reported.plan.stages, peaks, 2**40, CAPTION).axes[0])


def test_loss_curves_validation_points_and_entropy(drawn: dict[str, Figure], reported: Reported) -> None:
    found = lines(drawn["losses"].axes[0])
    for name in ("exit_3", "exit_6", "final"):
        train, points = found[f"train-{name}"], found[f"validation-{name}"]
        assert list(train.get_xdata()) == [r.iteration for r in reported.run.train]
        assert list(train.get_ydata()) == [r.losses[name] for r in reported.run.train]
        assert list(points.get_xdata()) == [0, 25]
        assert list(points.get_ydata()) == [r.losses[name] for r in reported.run.validation]
    assert found["unigram-entropy"].get_ydata()[0] == 4.6


def test_a_diverged_loss_leaves_a_gap_and_no_label() -> None:
    curve = [(1, {"exit_1": 3.0, "final": 3.0}), (2, {"exit_1": 2.0, "final": float("nan")})]
    figure = loss_figure(curve, [], None, ("exit_1", "final"), CAPTION)
    assert np.isnan(lines(figure.axes[0])["train-final"].get_ydata()[1])
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert any(label.startswith("exit_1") for label in labels)
    assert not any(label.startswith("final") for label in labels)


def test_the_layout_has_every_layer_and_flags_at_the_exits(drawn: dict[str, Figure]) -> None:
    axes = drawn["layout"].axes[0]
    boxes_by_layer = bars(axes)
    assert len(boxes_by_layer) == 9
    for name, layer in (("exit_3", 3), ("exit_6", 6), ("final", 9)):
        box = boxes_by_layer[f"layer-{layer}"]
        flag = lines(axes)[f"flag-{name}"].get_xdata()[0]
        assert flag == pytest.approx(box.get_x() + box.get_width(), abs=0.05)


def test_an_exit_has_one_colour_everywhere(drawn: dict[str, Figure]) -> None:
    colours = exit_colours(("exit_3", "exit_6", "final"))
    assert len(set(colours.values())) == 3
    for name, colour in colours.items():
        assert same_color(lines(drawn["losses"].axes[0])[f"train-{name}"].get_color(), colour)
        assert same_color(lines(drawn["layout"].axes[0])[f"flag-{name}"].get_color(), colour)


def test_every_figure_names_hardware_and_batch_and_has_units(drawn: dict[str, Figure]) -> None:
    for name, figure in drawn.items():
        assert figure.get_supxlabel() == CAPTION
        assert figure.get_suptitle()
        # Shares and probabilities have none.
        if name not in ("layout", "usage", "reliability"):
            label = figure.axes[0].get_xlabel()
            assert label == "iteration" or any(unit in label for unit in ("(s)", "(ms)", "(MiB)"))


def test_spread_moves_labels_apart_in_order() -> None:
    moved = spread([2.0, 1.0, 1.01, 5.0], 0.5)
    assert moved[3] == 5.0
    assert moved[1] < moved[2] < moved[0]
    ordered = sorted(moved)
    assert all(b - a > 0.499 for a, b in pairwise(ordered))
    assert spread([1.0, 2.0], 0.5) == [1.0, 2.0]
