"""Measured data of others: not part of the project, looked for beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def validation_data() -> Path:
    """Folder with the measured data; tests that need it are skipped without."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "validation"
    folder = Path(os.environ.get("EEPLAN_VALIDATION_DATA", beside))
    if not (folder / "table1.json").is_file():
        pytest.skip("no measured data: set EEPLAN_VALIDATION_DATA to the folder that holds table1.json")
    return folder
