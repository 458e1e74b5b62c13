"""What all tests share: how properties draw their examples, and where the measured data of others lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# `make test` gives the same answer everywhere; `make test-long` draws examples that nobody has seen.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def validation_data() -> Path:
    """Folder with the measured data, no part of the project; tests that need it are skipped without."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "validation"
    folder = Path(os.environ.get("EEPLAN_VALIDATION_DATA", beside))
    if not (folder / "table1.json").is_file():
        pytest.skip("no measured data: set EEPLAN_VALIDATION_DATA to the folder that holds table1.json")
    return folder
