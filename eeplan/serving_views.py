"""A calibration's certificate as cells of a table; ``views`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eeplan.decode_views import Cells
from eeplan.report import words


def certificate_cells(certificate: Mapping[str, Any]) -> tuple[Cells, ...]:
    """Both selections: thresholds, what they give on the calibration text, and how they were tested."""
    rows = []
    for name in ("single", "per_exit"):
        found = certificate[name]
        if found is not None:
            rows.append(
                (
                    name + (" (chosen)" if certificate["chosen"] == name else ""),
                    thresholds_text(found["thresholds"] if name == "per_exit" else found["thresholds"][:1]),
                    words.percent(found["mean_loss"], 2),
                    f"{found['p_value']:.2g}" if found["passed"] else "none passed",
                    f"{found['mean_depth']:.2f}",
                    " ".join(words.percent(share) for share in found["exit_shares"]),
                    str(found["units_tested"]),
                )
            )
    title = (
        f"thresholds for {certificate['metric']} at most {words.percent(certificate['risk'], 2)} with "
        f"confidence {words.percent(certificate['confidence'])}, on {certificate['data']}"
    )
    columns = ("thresholds", "by exit", "loss", "p-value", "mean depth", "left at", f"{certificate['unit']}s")
    return (Cells(title, tuple(rows), columns),)


def thresholds_text(thresholds: object) -> str:
    """Thresholds with commas, or a single one."""
    assert isinstance(thresholds, list | tuple)
    return ", ".join(f"{one:g}" for one in thresholds)
