"""Where campaigns keep their work and their evidence."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports" / "training"


def work_folder(name: str) -> Path:
    """Made if missing: ``build/campaigns/<name>``, or below EEPLAN_CAMPAIGNS. Delete it to begin anew."""
    folder = Path(os.environ.get("EEPLAN_CAMPAIGNS", ROOT / "build" / "campaigns")) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
