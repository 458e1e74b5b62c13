"""What all tests share: how properties draw their examples, and where the measured data of others lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch: every worker of pytest is one of as many processes as there are cores, and
# ranks that tests start share the cores with it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` gives the same answer everywhere; `make test-long` draws examples that nobody has seen.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def pristine_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(pristine_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the small world of ``world.py``, in which the test then stands."""
    folder = tmp_path / "world"
    shutil.copytree(pristine_world, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def validation_data() -> Path:
    """Folder with the measured data, no part of the project; tests that need it are skipped without."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "validation"
    folder = Path(os.environ.get("EEPLAN_VALIDATION_DATA", beside))
    if not (folder / "table1.json").is_file():
        pytest.skip("no measured data: set EEPLAN_VALIDATION_DATA to the folder that holds table1.json")
    return folder
