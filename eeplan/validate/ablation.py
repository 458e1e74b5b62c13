"""The published ablation of EE-LLM's two placement optimizations, and files of the same form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, PositiveFloat, PositiveInt, model_validator

from eeplan.optables import read_json
from eeplan.schema import Model, validate
from eeplan.spec import Boundary, ExitForward

ModelName = Literal["1.3B", "7B"]
SetupName = Literal["standard", "early_exit", "optimization_1", "optimization_2", "both"]

PUBLISHED: tuple[tuple[ModelName, SetupName, float, float], ...] = (
    ("1.3B", "standard", 5.23, 19.85),
    ("1.3B", "early_exit", 5.31, 24.05),
    ("1.3B", "optimization_1", 5.29, 22.56),
    ("1.3B", "optimization_2", 5.28, 20.23),
    ("1.3B", "both", 5.24, 19.85),
    ("7B", "standard", 17.75, 62.27),
    ("7B", "early_exit", 17.93, 67.42),
    ("7B", "optimization_1", 17.91, 65.79),
    ("7B", "optimization_2", 17.81, 62.27),
    ("7B", "both", 17.79, 62.27),
)
"""Seconds per iteration and peak GB per device (EE-LLM, ICML 2024, ablation of the two optimizations)."""

SHAPES: dict[ModelName, tuple[int, int, int]] = {"1.3B": (24, 2048, 32), "7B": (32, 4096, 32)}
"""(layers, hidden size, attention heads) of the paper's models."""
VOCABULARY = 32_000
SEQ_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the ablation, without its model."""

    boundary: Boundary | None
    """Of both exits: ``after`` the last layer of a stage, or ``before`` the first of the next; None: no
    exits."""
    exit_forward: ExitForward


SETUPS: dict[SetupName, Setup] = {
    "standard": Setup(None, "deferred"),
    "early_exit": Setup("after", "eager"),
    "optimization_1": Setup("after", "deferred"),
    "optimization_2": Setup("before", "eager"),
    "both": Setup("before", "deferred"),
}


class Row(Model):
    """One cell of the table: time and memory of a model in a setup."""

    model_config = ConfigDict(extra="ignore")

    model: ModelName
    setup: SetupName
    iteration_time_s: PositiveFloat
    peak_memory_gb: PositiveFloat


class AblationCluster(Model):
    """Parallelism and batch of all rows."""

    model_config = ConfigDict(extra="ignore")

    pipeline_parallel: PositiveInt = 4
    micro_batch_size: PositiveInt = 2
    global_batch_size: PositiveInt = 128
    seq_length: PositiveInt = SEQ_LENGTH


class Ablation(Model):
    """The whole table."""

    model_config = ConfigDict(extra="ignore")

    setup: AblationCluster = AblationCluster()
    rows: tuple[Row, ...]

    @model_validator(mode="after")
    def _stages_divide(self) -> Self:
        if any(layers % self.setup.pipeline_parallel for layers, _, _ in SHAPES.values()):
            raise ValueError(
                f"setup.pipeline_parallel is {self.setup.pipeline_parallel}; expected a divisor of the "
                "models' layers"
            )
        return self

    @model_validator(mode="after")
    def _standard_rows_are_there(self) -> Self:
        given = {row.model for row in self.rows}
        calibrating = {row.model for row in self.rows if row.setup == "standard"}
        if calibrating != set(SHAPES) or len(self.rows) != len({(r.model, r.setup) for r in self.rows}):
            raise ValueError(
                f"rows of {sorted(given)}, standard ones of {sorted(calibrating)}; expected each row once, "
                f"and the standard rows of {' and '.join(SHAPES)}, which calibrate"
            )
        return self


def read_ablation(path: Path | None) -> Ablation:
    """A file of this form, or the published figures when None.

    Raises:
        FileError, SchemaError.
    """
    if path is not None:
        return validate(read_json(path, "validation data"), Ablation, f"validation data {path}")
    rows = [
        {"model": model, "setup": setup, "iteration_time_s": seconds, "peak_memory_gb": gigabytes}
        for model, setup, seconds, gigabytes in PUBLISHED
    ]
    return validate({"rows": rows}, Ablation, "published figures")
