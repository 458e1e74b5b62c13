"""Tables for people: the same cells in plain text and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from builders import make_profile, make_run

from eeplan.sim.planner import make_plan
from eeplan.views import (
    Table,
    plain,
    plan_tables,
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
        for cell in (table.title, *table.columns, *(cell for row in table.rows for cell in row)):
            assert cell in on_terminal.getvalue()
        for cell in (table.title, *(cell for row in table.rows for cell in row)):
            assert cell in in_pipe.getvalue()
    assert "layer (extrapolated)" in in_pipe.getvalue()
    assert "not measured at this size" in in_pipe.getvalue()


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
