"""Tables for people: the same cells in plain text and on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from builders import make_profile, make_run

from eeplan.plan_views import plan_tables
from eeplan.report.insights import headroom_sentences
from eeplan.sim.planner import make_plan
from eeplan.views import (
    Table,
    plain,
    profile_tables,
    record_table,
    show,
    summary_tables,
)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_line_up() -> None:
    table = Table("title", (("a", "1"), ("long", "22")), ("name", "n"))
    assert plain(table) == "title\n  name  n\n  a     1\n  long  22"


def test_sentences_stand_below_their_row() -> None:
    table = Table(
        "t", (("split", "4, 4", "equal", ""),), ("what", "choice", "why", "rejected"), sentences=True
    )
    assert plain(table) == "t\n  split: 4, 4\n    why: equal"


def test_a_terminal_shows_every_cell_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    run = make_run(exits={"count": 2})
    profile = make_profile(run, extrapolated=("layer",))
    tables = (*plan_tables(make_plan(run, "0" * 64, profile, "1" * 64)), *profile_tables(profile))
    on_terminal, in_pipe = FakeTerminal(), io.StringIO()
    show(tables, on_terminal)
    show(tables, in_pipe)
    for table in tables:
        # The name, the choice and the reason of a decision need no heading.
        headings = table.columns[3:] if table.sentences else table.columns
        cells = [cell for row in table.rows for cell in row]
        for cell in (table.title, *headings, *cells, *table.notes):
            assert cell in on_terminal.getvalue()
        for cell in (table.title, *cells, *table.notes):
            assert cell in in_pipe.getvalue()
    assert "layer (extrapolated)" in in_pipe.getvalue()
    assert "not measured" in in_pipe.getvalue()


def test_a_terminal_of_120_columns_needs_no_second_line_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sentences wrap: every row of the time and memory tables stays on its line."""
    monkeypatch.setenv("COLUMNS", "120")
    run = make_run(exits={"count": 2}, model__num_layers=60, parallel__pipeline_model_parallel_size=4)
    plan = make_plan(run, "0" * 64, make_profile(run), "1" * 64)
    stream = FakeTerminal()
    show(plan_tables(plan), stream)
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()]
    for index, stage in enumerate(plan.stages):
        layers = f"{stage.first_layer}-{stage.last_layer}"
        (found,) = [words for words in lines if words[:2] == [str(index), layers]]
        # Forward, backward, busy, three idle times, two rooms, with their units.
        assert len(found) >= 2 + 1 + 2 + 2 + 4 * 2 + 2
    narrow = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "50")
    show(plan_tables(plan), narrow)
    assert len(narrow.getvalue().splitlines()) > len(stream.getvalue().splitlines())


def test_headroom_is_told_in_a_sentence() -> None:
    """The issue's own words: another so many ms per microbatch, for free."""
    run = make_run(parallel__pipeline_model_parallel_size=4, training__global_batch_size=64)
    seconds = {"embedding": (0.02, 0.03), "layer": (0.001, 0.002), "final_head": (0.001, 0.002)}
    plan = make_plan(run, "0" * 64, make_profile(run, op_seconds=seconds), "1" * 64)
    free_s = [stage.time_headroom.free_s for stage in plan.stages]
    best = free_s.index(max(free_s))
    (sentence, *_) = headroom_sentences(plan)
    assert sentence.startswith(
        f"Stage {best} can take another {1e3 * free_s[best]:.1f} ms per microbatch for free"
    )
    seconds["final_head"], seconds["embedding"] = (0.02, 0.03), (0.001, 0.002)
    behind = make_plan(run, "0" * 64, make_profile(run, op_seconds=seconds), "1" * 64)
    assert "and make the iteration only that much longer, not 32 times" in headroom_sentences(behind)[-1]
    alone = make_plan(
        make_run(parallel__pipeline_model_parallel_size=1), "0" * 64, make_profile(run), "1" * 64
    )
    assert headroom_sentences(alone)[0].startswith("No stage has room")


def test_plain_numbers_have_plain_spaces_and_signs() -> None:
    summary = {
        "predicted": {"iteration_time_s": 0.9, "peak_bytes": [2**20]},
        "measured": {"iteration_time_s": 1.0, "peak_bytes": [2**21]},
        "error": {"iteration_time": -0.1, "peak_bytes": [-0.5]},
        "losses": {"final": [5.0, 3.25]},
    }
    text = "\n".join(map(plain, summary_tables(summary, Path("out/index.html"))))
    assert "900 ms     1.00 s    -10.0 %" in text
    assert "1.00 MiB   2.00 MiB  -50.0 %" in text
    assert "5.000  3.250" in text
    assert text.endswith("out/index.html")


def test_records_are_flattened() -> None:
    assert plain(record_table("t", {"a": {"b": 1.23456, "c": [1, 2]}})) == "t\n  a.b  1.235\n  a.c  1, 2"
