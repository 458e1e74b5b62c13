"""One fake run and one report of it, shared by the tests that only look."""

from __future__ import annotations

import pytest
from fake_run import Reported, write_fake_run

from eeplan.report.build import write_report
from eeplan.report.rundir import read_run


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    base = tmp_path_factory.mktemp("report")
    plan = write_fake_run(base / "run", stages=3, layers=9, exit_depths=(3, 6), iterations=25, seed=7)
    summary = write_report(base / "run", base / "page")
    return Reported(base / "run", base / "page", plan, read_run(base / "run"), summary)
