"""Metrics to Weights & Biases, where a run asks for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eeplan.plan import Plan


class WandbLog:
    """One run of a project; going on in the same run folder goes on with the same run there."""

    def __init__(self, project: str, plan: Plan, out: Path) -> None:
        import wandb

        identity = f"{plan.content_sha256}:{out.resolve()}"
        self._run: Any = wandb.init(
            project=project,
            name=plan.run.name,
            id=hashlib.sha256(identity.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(out),
            config=plan.run.model_dump(mode="json"),
        )

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Numbers of an iteration; several calls for one iteration add up."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
