"""The ranks of test_checkpoint_reshard: one state through several layouts, then a poisoned parameter.

``main`` gets a folder, and layouts; the folder has ``LAYOUT.yaml``, the plan of each.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import forget_layout

from eeplan.errors import TrainingError
from eeplan.plan import Plan, load_plan
from eeplan.runtime import loop, resume
from eeplan.runtime.backend import stop
from eeplan.runtime.batches import build_batches
from eeplan.runtime.checkpoint_state import named_state, whole_state
from eeplan.runtime.setup import Rank, set_up

STEPS = 3


def fingerprint(rank: Rank) -> dict[str, str]:
    """Digest of every tensor, whole, without the vocabulary's padding."""
    rows = rank.plan.run.model.vocab_size
    digests = {}
    for key, tensor in whole_state(rank.model, rank.training).items():
        is_vocabulary = key.endswith(("word_embeddings.weight", "output_layer.weight"))
        real = tensor[:rows] if is_vocabulary else tensor
        digests[key] = hashlib.sha256(
            real.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return digests


def begin(plan: Plan) -> tuple[Rank, Any]:
    forget_layout()
    rank = set_up(plan)
    return rank, build_batches(plan.run, rank_info=rank.backend)


def through_layouts(folder: Path, layouts: list[str]) -> list[Any]:
    """Train in the first layout, then load, look and save in each."""
    seen: list[Any] = []
    for number, layout in enumerate(layouts):
        rank, stream = begin(load_plan(folder / f"{layout}.yaml"))
        if number == 0:
            for iteration in range(1, STEPS + 1):
                loop._train_step(rank, stream, iteration)
        else:
            found = resume.find_together(folder / f"run{number - 1}" / "checkpoints", rank.plan)
            assert found is not None
            resume.restore(rank, stream, found)
        position = resume.position_of(rank, stream, STEPS)
        seen.append([fingerprint(rank), position.to_json()])
        loop._save(rank, stream, STEPS, folder / f"run{number}")
    return seen


def poisoned(plan: Plan, victim: int) -> dict[str, Any]:
    """Put a NaN into a parameter of one rank before the second iteration."""
    rank, stream = begin(plan)
    loop._train_step(rank, stream, 1)
    if dist.get_rank() == victim:
        with torch.no_grad():
            rank.model.decoder.layers[0].mlp.linear_fc2.weight[0, 0] = float("nan")
    before = {key: tensor.clone() for key, _, tensor, _ in named_state(rank.model, rank.training)}
    learning_rate = rank.training.learning_rate_steps
    try:
        loop._train_step(rank, stream, 2)
        message = ""
    except TrainingError as error:
        message = str(error)
    changed = [
        key
        for key, _, tensor, _ in named_state(rank.model, rank.training)
        if not torch.equal(before[key].nan_to_num(), tensor.nan_to_num())
    ]
    same = rank.training.learning_rate_steps == learning_rate
    return {"message": message, "changed": changed, "learning rate is the same": same}


def main(root: Path, *layouts: str) -> None:
    result = {
        "layouts": through_layouts(root, list(layouts)),
        "poisoned": [poisoned(load_plan(root / f"{layouts[0]}.yaml"), rank) for rank in (0, 1)],
    }
    (root / f"seen.{dist.get_rank()}.json").write_text(json.dumps(result))
    stop()
