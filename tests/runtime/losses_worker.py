"""The ranks of test_losses: every case on this rank's share of the vocabulary.

``main`` gets a folder with ``inputs.pt``; rank r writes ``seen.r.pt``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from oracles.naive_losses import LossCase

from eeplan.runtime.backend import start, stop
from eeplan.runtime.losses import head_loss, judge_tokens
from eeplan.spec import DistillationSpec


def share(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of the last axis."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(size, dim=-1)[parallel_state.get_tensor_model_parallel_rank()].clone()


def losses(inputs: dict[str, Any], case: LossCase) -> dict[str, torch.Tensor]:
    """Both losses, and the gradient of the first."""
    # A leaf may not be overwritten, so the loss gets a copy.
    logits = share(inputs["logits"]).float().requires_grad_()
    teacher, distilled = share(inputs["teacher"]).float(), None
    if case.distillation_weight:
        distilled = DistillationSpec(
            weight=case.distillation_weight, temperature=case.distillation_temperature
        )
    loss = head_loss(
        logits.clone(),
        inputs["labels"],
        inputs["mask"].float(),
        temperature=case.temperature,
        weighs_tokens=case.weighs_tokens,
        teacher_SBV=teacher,
        distillation=distilled,
    )
    loss.objective.backward()
    assert logits.grad is not None
    return {"objective": loss.objective.detach(), "reported": loss.reported, "gradient": logits.grad}


def judged(inputs: dict[str, Any], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Cross entropy, prediction, probability."""
    labels = inputs["labels"].clamp(max=vocab_size - 1)
    found = judge_tokens(share(inputs["logits"]).float(), labels, vocab_size)
    return found.cross_entropy, found.predicted, found.probability


def main(folder: Path) -> None:
    inputs = torch.load(folder / "inputs.pt", weights_only=False)
    backend = start(tensor_model_parallel_size=inputs["size"])
    result = {
        "losses": [losses(inputs, case) for case in inputs["cases"]],
        "judged": [judged(inputs, vocab_size) for vocab_size in inputs["vocab_sizes"]],
    }
    torch.save(result, folder / f"seen.{backend.rank}.pt")
    stop()
