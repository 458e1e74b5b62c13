"""Going on from the newest valid checkpoint: exactly, or not at all.

After a resume in the same layout every later step is bitwise what it would have been. In another layout the
tensors, the data and the learning rate are the same, and only the order of sums differs.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eeplan.errors import CheckpointError, EeplanError
from eeplan.plan import Plan
from eeplan.runtime.batches import BatchStream
from eeplan.runtime.checkpoint import RANDOM
from eeplan.runtime.checkpoint_files import checkpoints_in, verify
from eeplan.runtime.checkpoint_state import (
    Position,
    load_tensors,
    place_of,
    set_random_state,
)
from eeplan.runtime.plan_identity import training_hash
from eeplan.runtime.setup import Rank
from eeplan.runtime.stage import loss_weights


@dataclass(frozen=True, slots=True)
class Found:
    """Where training may go on, and what to tell about it."""

    folder: Path
    position: Position
    notes: tuple[str, ...]


def find(folder: Path, plan: Plan) -> Found | None:
    """The newest valid checkpoint of ``plan`` below ``folder``; None when there is none at all.

    Raises:
        CheckpointError: there are checkpoints, but no valid one; or the newest valid one is of a plan that
            differs in more than the parallel layout, or holds a model only.
    """
    damaged: list[str] = []
    for path in checkpoints_in(folder):
        try:
            manifest = verify(path)
        except CheckpointError as error:
            damaged.append(str(error).split("; use ")[0])
            continue
        expected, written = training_hash(plan), manifest["training_sha256"]
        if written != expected:
            raise CheckpointError(
                f"checkpoint {path} was written for another plan (hash {written[:12]}…, this plan "
                f"{expected[:12]}…, parallel layout left out); choose another --out, or use --restart"
            )
        if manifest["position"] is None:
            raise CheckpointError(
                f"checkpoint {path} holds a model without optimizer state; choose another --out, or use "
                "--restart"
            )
        note = f"going on from checkpoint {path.name} in {folder}"
        return Found(path, Position.from_json(manifest["position"]), (*damaged, note))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} is valid: {'; '.join(damaged)}; use --restart to begin anew"
        )
    return None


def find_together(folder: Path, plan: Plan) -> Found | None:
    """:func:`find` on rank 0 for all ranks; collective.

    Raises:
        CheckpointError: on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = find(folder, plan)
        except CheckpointError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    found: Found | None = outcome[0]
    return found


def position_of(rank: Rank, stream: BatchStream, iteration: int) -> Position:
    """Where a run stands after ``iteration`` iterations."""
    return Position(
        iteration=iteration,
        consumed_samples=stream.consumed_samples,
        learning_rate_steps=rank.training.learning_rate_steps,
        optimizer_steps=rank.training.optimizer_steps,
        loss_weights=loss_weights(rank.plan, iteration + 1),
        loss_scaling=rank.training.loss_scaling,
    )


def restore(rank: Rank, stream: BatchStream, found: Found) -> list[str]:
    """Put this rank where the checkpoint was written; collective over all ranks.

    Returns:
        What could not be kept, if anything, to be told.

    Raises:
        CheckpointError: on every rank, if the checkpoint does not fit on any.
    """
    problem: str | None = None
    notes: list[str] = []
    try:
        load_tensors(found.folder, rank.model, rank.training)
        _check_loss_weights(rank.plan, found)
        stream.seek(found.position.consumed_samples)
        rank.training.optimizer_steps = found.position.optimizer_steps
        rank.training.learning_rate_steps = found.position.learning_rate_steps
        rank.training.loss_scaling = found.position.loss_scaling
        states = torch.load(found.folder / RANDOM, weights_only=True)
        place = place_of(rank.backend)
        if place in states:
            set_random_state(states[place])
        else:
            notes.append("the checkpoint is of another parallel layout: random generators start anew")
    except (EeplanError, OSError, ValueError) as error:
        problem = str(error)
    problems: list[Any] = [None] * rank.backend.world_size
    dist.all_gather_object(problems, problem)
    first = next((text for text in problems if text is not None), None)
    if first is not None:
        raise CheckpointError(first)
    return notes


def _check_loss_weights(plan: Plan, found: Found) -> None:
    expected = loss_weights(plan, found.position.iteration + 1)
    if found.position.loss_weights != expected:
        raise CheckpointError(
            f"checkpoint {found.folder}: the loss weights to go on with were {found.position.loss_weights}, "
            f"this version computes {expected}; use the version that wrote it"
        )


def start_over(out: Path) -> None:
    """Forget an earlier run in ``out``: its checkpoints and measurements, not its plan or log."""
    checkpoints = out / "checkpoints"
    if checkpoints.exists():
        hidden = out / ".checkpoints.old"
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(checkpoints, hidden)
        shutil.rmtree(hidden)
    for name in ("metrics.jsonl", "measured.json", "timelines.json", "evaluation.json", "usage.yaml"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "tensorboard", ignore_errors=True)
