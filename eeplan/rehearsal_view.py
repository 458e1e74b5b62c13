"""A rehearsal for people: predicted beside measured, as a whole and per stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eeplan.report import words
from eeplan.views import Table, plain_text


def rehearsal_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Tables of a rehearsal's result (``runtime.rehearse.Rehearsal.to_json``)."""

    def row(name: str, what: str) -> tuple[str, ...]:
        predicted, measured = result[f"predicted_{what}_s"], result[f"measured_{what}_s"]
        error = f"{result[f'{what}_error']:+.1%}"
        return name, plain_text(words.seconds(predicted)), plain_text(words.seconds(measured)), error

    scale = f", sleeps x {result['time_scale']:g}" if result["time_scale"] != 1.0 else ""
    return (
        Table(
            f"rehearsal: {result['stages']} processes, {result['iterations']} iterations{scale}",
            (row("iteration", "iteration"), row("pipeline", "pipeline")),
            ("", "predicted", "measured", "error"),
        ),
        Table(
            "stages",
            tuple(
                (
                    str(index),
                    *(
                        plain_text(words.seconds(stage[key]))
                        for key in (
                            *("predicted_busy_s", "measured_busy_s"),
                            *("predicted_end_s", "measured_end_s", "latest_start_s"),
                        )
                    ),
                )
                for index, stage in enumerate(result["per_stage"])
            ),
            ("stage", "busy predicted", "measured", "end predicted", "measured", "latest op late by"),
        ),
    )
