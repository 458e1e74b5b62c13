"""The picture of a pipeline says what the timeline says."""

from __future__ import annotations

import pytest

from eeplan.sim import ascii as ascii_art
from eeplan.sim.ascii import render
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b
from eeplan.timeline import Span, Timeline


def test_the_picture_in_the_module() -> None:
    timeline = simulate(one_f_one_b(4, 6), PipelineCosts((1,) * 4, (2,) * 4))
    lines = render(timeline, 60).splitlines()
    assert [f"    {line}" for line in lines[:5]] == (ascii_art.__doc__ or "").splitlines()[2:7]
    assert "<digit: its backward" in lines[5]


@pytest.mark.parametrize("width", [30, 61, 110, 400])
def test_one_row_a_stage_of_equal_width(width: int) -> None:
    timeline = simulate(
        one_f_one_b(12, 30), PipelineCosts((1_000_001,) * 12, (2_000_300,) * 12, (20_000,) * 11)
    )
    rows = render(timeline, width).splitlines()[:12]
    assert [row[:9] for row in rows] == [f"stage {i:<2} "[:9] for i in range(12)]
    assert {len(row) for row in rows} == {width}


def test_ticks_stand_under_their_time() -> None:
    timeline = Timeline(
        ((Span(0, "forward", 0, 0, 3_000_000), Span(0, "backward", 0, 3_000_000, 10_000_000)),)
    )
    row, axis, _ = render(timeline, 110).splitlines()
    assert axis.split() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "ms"]
    assert axis.index("3") == row.index("<")


def test_a_longer_op_wins_its_column_over_a_thinner_one() -> None:
    spans = (
        Span(0, "forward", 0, 0, 10),
        Span(0, "forward", 1, 10, 990),
        Span(0, "forward", 2, 1000, 1005),
        Span(0, "backward", 0, 2000, 2000),
    )
    row = render(Timeline((spans,)), 30).splitlines()[0]
    assert row.startswith("stage 0 |1")
    assert row.endswith(".<|")
    assert "2" in row


def test_ops_of_the_whole_iteration_have_marks_and_a_legend() -> None:
    spans = (
        Span(0, "forward", 0, 0, 50),
        Span(0, "grad_sync", -1, 50, 80),
        Span(0, "optimizer", -1, 80, 100),
    )
    row, _, legend = render(Timeline((spans,)), 110).splitlines()
    assert row == f"stage 0 |{'0' * 50}{'+' * 30}{'*' * 20}|"
    assert legend.endswith("+ grad_sync; * optimizer")


def test_an_empty_timeline_and_a_narrow_terminal() -> None:
    assert render(Timeline(((), ())), 40).splitlines()[0] == "stage 0 |.|"
    with pytest.raises(ValueError, match="give at least 20"):
        render(Timeline(((),)), 19)
