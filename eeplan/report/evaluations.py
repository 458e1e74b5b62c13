"""Reads what was measured about a trained model's exits: their worth on held-out text, and decoding speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt

from eeplan.errors import FileError
from eeplan.files import read_bytes
from eeplan.schema import Model, validate

EVALUATION, USAGE, DECODE_BENCH = "evaluation.json", "usage.yaml", "decode_bench.json"
"""In the run folder: the first two are training's own, the third is what ``eeplan bench decode RUN --json``
prints, kept there by hand."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Record(Model):
    """Keys that the report does not use are left alone."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)


class ReliabilityBin(_Record):
    """Tokens whose most likely continuation got a probability between two bounds."""

    lower: Share
    upper: Share
    tokens: PositiveInt
    mean_probability: Share
    accuracy: Share


class ExitWorth(_Record):
    """One exit as if it emitted every token."""

    cross_entropy: float
    accuracy: Share
    agreement_with_final: Share
    calibration_error: Share
    reliability: tuple[ReliabilityBin, ...]


class Speed(_Record):
    """Of decoding one sequence."""

    speed_up: Annotated[float, Field(gt=0.0)]
    """Over ``full``."""


class MeasuredSpeed(Speed):
    """Of one mode."""

    mode: str


class ThresholdWorth(_Record):
    """What is emitted when tokens leave at one threshold."""

    threshold: Share
    exit_shares: tuple[Share, ...]
    """By depth, the final exit last."""
    mean_depth: float
    accuracy: Share
    agreement_with_final: Share
    predicted: dict[str, Speed] | None = None
    """By mode; only ``eeplan evaluate`` predicts and measures speed."""
    measured: MeasuredSpeed | None = None


class Worth(_Record):
    """What a model's exits are worth, and what tokens that leave at them give."""

    num_tokens: PositiveInt
    exits: dict[str, ExitWorth]
    thresholds: Annotated[tuple[ThresholdWorth, ...], Field(min_length=1)]


class Evaluation(Worth):
    """``evaluation.json``."""

    iteration: int
    source: str


class DecodeRun(_Record):
    """One decoding mode at one batch size and threshold."""

    mode: str
    batch: PositiveInt
    threshold: float | tuple[float, ...]
    tokens_per_s: Annotated[float, Field(gt=0.0)]
    predicted_tokens_per_s: float | None = None
    agreement_with_full: float | None = None


class DecodeBench(_Record):
    """``decode_bench.json``."""

    runs: Annotated[tuple[DecodeRun, ...], Field(min_length=1)]


def read_evaluation(path: Path, names: Sequence[str]) -> Evaluation | None:
    """Read what exits are worth; None where the file is not there.

    Args:
        names: of the plan's losses.

    Raises:
        FileError: not JSON, or of another model. SchemaError: it breaks its format.
    """
    document = _json(path)
    if document is None:
        return None
    found = validate(document, Evaluation, f"evaluation file {path}")
    if set(found.exits) != set(names):
        raise FileError(
            f"evaluation file {path}: exits are {sorted(found.exits)}, the plan's are {sorted(names)}; the "
            "files are of different runs, train again"
        )
    for point in found.thresholds:
        if len(point.exit_shares) != len(names):
            raise FileError(
                f"evaluation file {path}: threshold {point.threshold} has {len(point.exit_shares)} shares "
                f"for {len(names)} exits; train again"
            )
    return found


def judged(result: Mapping[str, Any]) -> Worth:
    """What ``eeplan evaluate --json`` prints, in the form of training's own evaluation.

    Raises:
        SchemaError: it breaks its format.
    """
    exits = {one["name"]: one for one in result["exits"]}
    return validate({**result, "exits": exits}, Worth, "result of an evaluation")


def read_decode_bench(path: Path) -> DecodeBench | None:
    """Read measured decoding speeds; None where the file is not there.

    Raises:
        FileError: not JSON. SchemaError: it breaks its format.
    """
    document = _json(path)
    return None if document is None else validate(document, DecodeBench, f"decode bench file {path}")


def _json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(read_bytes(path, "file"))
    except ValueError as error:
        raise FileError(f"{path} is not JSON ({error}); make it again, the file is damaged") from None
