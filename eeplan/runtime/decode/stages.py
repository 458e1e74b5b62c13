"""A checkpoint cut into pipeline stages for decoding, whatever layout it was trained in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from eeplan.errors import CheckpointError, DecodeError
from eeplan.plan import Plan, load_plan
from eeplan.runtime.checkpoint import PLAN, usable
from eeplan.runtime.decode.team import ALONE, Team
from eeplan.runtime.decode.weights import Weights, stored_weights
from eeplan.runtime.model import ExitSpec, StageSpec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    plan: Plan


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` means, verified; where a newer one is damaged, stderr says so.

    Raises:
        CheckpointError: missing, damaged, or not of its own plan.
    """
    folder, manifest, notes = usable(path)
    for note in notes:
        print(f"eeplan: {note}", file=sys.stderr)
    plan = load_plan(folder / PLAN)
    if plan.content_sha256 != manifest["plan_sha256"]:
        raise CheckpointError(f"checkpoint {folder} was not written by the {PLAN} in it; use another")
    return Checkpoint(folder, plan)


def decode_stages(plan: Plan, num_stages: int) -> tuple[StageSpec, ...]:
    """The plan's own stages where the number is the same, else layers spread evenly, more on earlier ones.

    An exit between two stages belongs to the earlier one: its token then returns before the message goes on.

    Raises:
        DecodeError: there are not so many layers.
    """
    num_layers = plan.run.model.num_layers
    if not 1 <= num_stages <= num_layers:
        raise DecodeError(
            f"pipeline size is {num_stages}; expected 1 to {num_layers}, the number of the model's layers"
        )
    if len(plan.stages) == num_stages:
        ends = [stage.last_layer for stage in plan.stages]
    else:
        least, more = divmod(num_layers, num_stages)
        ends = [least * count + min(more, count) for count in range(1, num_stages + 1)]
    starts = [0, *ends[:-1]]
    exits = sorted((ExitSpec(e.depth, e.head, e.tied) for e in plan.exits), key=lambda e: e.depth)
    return tuple(
        StageSpec(
            first_layer=start + 1,
            last_layer=end,
            exits=tuple(exit_ for exit_ in exits if _is_on(exit_.depth, start, end)),
            is_first=start == 0,
            is_last=end == num_layers,
        )
        for start, end in zip(starts, ends, strict=True)
    )


def _is_on(depth: int, start: int, end: int) -> bool:
    return start < depth <= end or depth == start == 0


def stage_weights(
    checkpoint: Checkpoint,
    stage: StageSpec,
    vocab_size: int | None,
    dtype: str | None,
    team: Team = ALONE,
) -> Weights:
    """Parameters of one stage, read from the checkpoint.

    Args:
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
        dtype: name of the torch dtype to compute in; default, as stored.
        team: processes that share the stage.

    Raises:
        DecodeError: there is no such dtype. CheckpointError: a tensor is missing or not readable.
    """
    run = checkpoint.plan.run
    known = run.model.vocab_size if vocab_size is None else vocab_size
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind = None if dtype is None else DTYPES.get(dtype)
    if dtype is not None and kind is None:
        raise DecodeError(f"dtype is '{dtype}'; expected one of {', '.join(DTYPES)}")
    return stored_weights(checkpoint.folder, run, stage, known, dtype=kind, device=device, team=team)
