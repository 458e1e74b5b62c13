"""Losses and judgements of a head from its whole logits, written as the formulas stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossCase:
    """Options of a head's loss."""

    temperature: float = 1.0
    weighs_tokens: bool = False
    distillation_weight: float = 0.0
    distillation_temperature: float = 1.0


def naive_loss(
    logits_SBV: Tensor, labels_BS: Tensor, mask_BS: Tensor, teacher_SBV: Tensor, case: LossCase
) -> tuple[Tensor, Tensor]:
    """What is minimised and what is reported, token by token."""
    objective, reported = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for s in range(logits_SBV.shape[0]):
        for b in range(logits_SBV.shape[1]):
            scaled = logits_SBV[s, b] / case.temperature
            entropy = torch.logsumexp(scaled, 0) - scaled[labels_BS[b, s]]
            weight = torch.softmax(scaled, 0).max().detach() if case.weighs_tokens else 1.0
            p = torch.softmax(logits_SBV[s, b] / case.distillation_temperature, 0)
            q = torch.softmax(teacher_SBV[s, b] / case.distillation_temperature, 0).detach()
            kl = case.distillation_temperature**2 * (q * (q.log() - p.log())).sum()
            objective = objective + mask_BS[b, s] * (weight * entropy + case.distillation_weight * kl)
            reported = reported + mask_BS[b, s] * entropy
    return objective / mask_BS.sum(), (reported / mask_BS.sum()).detach()


def naive_judgement(logits_SBV: Tensor, labels_BS: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, most likely token and its probability; the padding is not there."""
    share_SBV = torch.softmax(logits_SBV[..., :vocab_size], -1)
    label_SB = labels_BS.t()
    probability_SB, predicted_SB = share_SBV.max(-1)
    return -share_SBV.gather(-1, label_SB[..., None])[..., 0].log(), predicted_SB, probability_SB
