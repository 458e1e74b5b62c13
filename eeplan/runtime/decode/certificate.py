"""The certificate of a calibration: what was bounded, how, on which text, for which checkpoint.

One file, ``calibration.json``, in the checkpoint's folder. The checkpoint's manifest neither lists nor needs
it; it names the manifest's checksum, and its own, so that it serves no other checkpoint and no edit passes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from eeplan.errors import CheckpointError, FileError, SchemaError
from eeplan.files import read_bytes, write_text
from eeplan.runtime.decode.policy import ConfidenceKind
from eeplan.runtime.decode.risk_control import Metric
from eeplan.schema import Model, validate

CERTIFICATE = "calibration.json"
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Unit = Literal["document", "sequence"]
"""What is taken as drawn independently: documents, or windows of the model's sequence length."""


class TestedSetting(Model):
    """One setting of the thresholds and its test."""

    thresholds: tuple[Share, ...]
    mean_loss: float
    p_value: float


class Selection(Model):
    """The loosest setting that passed, and what it gives on the calibration text."""

    thresholds: tuple[Share, ...]
    """One for each early exit, by depth; all 1 if nothing passed."""
    passed: bool
    level: Share
    """Of its tests; what the confidence leaves, divided by the number of selections."""
    units_tested: int
    mean_loss: float
    p_value: float | None
    """Of this setting; None if nothing passed."""
    mean_depth: float
    exit_shares: tuple[Share, ...]
    """Tokens that leave at each exit, the final one last."""
    tested: tuple[TestedSetting, ...]
    """In their order, up to the first that did not pass."""


class Certificate(Model):
    """What ``eeplan calibrate`` found; see the module."""

    schema_version: Literal[1] = 1
    checkpoint: str
    checkpoint_sha256: str
    created: str
    """UTC, ISO 8601."""
    metric: Metric
    risk: Share
    confidence: Share
    p_value: str
    """How p-values were computed: a name of ``risk_control.P_VALUES``."""
    unit: Unit
    units: PositiveInt
    tokens: PositiveInt
    data: str
    data_sha256: str
    """Of the tokens that were judged, in their order."""
    seed: int
    confidence_kind: ConfidenceKind
    exits: tuple[int, ...]
    """Depths."""
    single: Selection
    """One threshold for all exits."""
    per_exit: Selection | None
    """One for each; None for a single exit, where it is the same."""
    chosen: Literal["single", "per_exit"]
    """The one with the smaller mean depth; both hold together with the stated confidence."""
    statement: str
    """What is claimed, in words."""
    assumption: str
    """What it rests on, in words."""

    @property
    def selection(self) -> Selection:
        """The chosen one."""
        return self.per_exit if self.chosen == "per_exit" and self.per_exit is not None else self.single

    @property
    def thresholds(self) -> tuple[float, ...]:
        """What decoding uses: one for all exits, or one for each by depth."""
        found = self.selection.thresholds
        return found[:1] if self.chosen == "single" else found


def store_certificate(folder: Path, certificate: Certificate) -> Path:
    """Write the certificate into its checkpoint's folder, in place of an older one.

    Raises:
        FileError: not writable.
    """
    path = folder / CERTIFICATE
    content = certificate.model_dump(mode="json")
    write_text(path, json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n")
    return path


def load_certificate(folder: Path, checkpoint_sha256: str) -> Certificate | None:
    """The certificate in a checkpoint's folder, None if there is none.

    Args:
        checkpoint_sha256: the ``manifest_sha256`` of the checkpoint that is in use.

    Raises:
        CheckpointError: damaged, edited, or another checkpoint's.
    """
    path = folder / CERTIFICATE
    if not path.exists():
        return None
    again = "run `eeplan calibrate` again, or remove it"
    try:
        content: dict[str, Any] = json.loads(read_bytes(path, "certificate"))
        digest = content.pop("sha256", None)
        if digest != _digest(content):
            raise CheckpointError(f"certificate {path} was changed after it was written; {again}")
        certificate = validate(content, Certificate, f"certificate {path}")
    except (FileError, SchemaError, ValueError, AttributeError, TypeError):
        raise CheckpointError(f"certificate {path} is damaged; {again}") from None
    if certificate.checkpoint_sha256 != checkpoint_sha256:
        raise CheckpointError(
            f"certificate {path} is of another checkpoint ({certificate.checkpoint}); {again}"
        )
    return certificate


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
