"""Losses of exits, and what exits say about every token, where tensor-parallel ranks share the vocabulary.

Each rank holds the logits of its part of the vocabulary; maxima and sums over all of it are all-reduces of
one number per token. The vocabulary's padding takes part in losses, as in Megatron, and never in judgements.

Shape suffixes: S sequence, B batch, V vocabulary (one tensor-parallel share of it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from eeplan.spec import DistillationSpec


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The loss of one head on one microbatch; scalars."""

    objective: Tensor
    """What is back-propagated, before the head's weight."""
    reported: Tensor
    """Detached mean cross entropy at the head's temperature: what logs show."""


def head_loss(
    logits_SBV: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor,
    *,
    temperature: float = 1.0,
    weighs_tokens: bool = False,
    teacher_SBV: Tensor | None = None,
    distillation: DistillationSpec | None = None,
) -> HeadLoss:
    """Mean over unmasked tokens of the cross entropy, weighted and distilled as asked. Overwrites the logits.

    Args:
        temperature: divides the logits of the cross entropy.
        weighs_tokens: multiply each token's cross entropy by the detached highest probability that the head
            gives to any token there (EE-Tuning, arXiv 2402.00518).
        teacher_SBV: logits of the final exit; with ``distillation`` adds its weight times
            :func:`distillation_loss` at its temperature.
    """
    mask_SB = loss_mask_BS.t()
    count = mask_SB.sum()
    distilled = None
    if distillation is not None and teacher_SBV is not None:
        kl_SB = distillation_loss(logits_SBV, teacher_SBV, distillation.temperature)
        distilled = distillation.weight * (kl_SB * mask_SB).sum() / count
    if temperature != 1.0:
        logits_SBV = logits_SBV / temperature
    weight_SB = highest_probability(logits_SBV) if weighs_tokens else None
    entropy_SB = cross_entropy(logits_SBV, labels_BS.t())
    mean = (entropy_SB * mask_SB).sum() / count
    objective = mean if weight_SB is None else (entropy_SB * weight_SB * mask_SB).sum() / count
    if distilled is not None:
        objective = objective + distilled
    return HeadLoss(objective, mean.detach())


def mean_cross_entropy(logits_SBV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
    """Mean over unmasked tokens of the cross entropy (scalar). Overwrites the logits."""
    mask_SB = loss_mask_BS.t()
    return (cross_entropy(logits_SBV, labels_BS.t()) * mask_SB).sum() / mask_SB.sum()


def cross_entropy(logits_SBV: Tensor, labels_SB: Tensor) -> Tensor:
    """Cross entropy [S, B] of each token, in fp32 or wider. Overwrites logits that are as wide.

    Every exit pays for one more of these. Like megatron-core's function it needs no second tensor of the
    logits' size, but goes over them four times instead of seven.
    """
    result: Tensor = _CrossEntropy.apply(logits_SBV, labels_SB)
    return result


class _CrossEntropy(torch.autograd.Function):
    """Keeps exp(z - max) in the place of the logits z, and makes it the gradient there."""

    @staticmethod
    def forward(ctx: Any, logits_SBV: Tensor, labels_SB: Tensor) -> Tensor:
        ctx.dtype = logits_SBV.dtype
        wide_SBV = logits_SBV.detach().to(torch.promote_types(logits_SBV.dtype, torch.float32))
        labels_SB1, is_mine_SB1 = _own_labels(labels_SB, wide_SBV.shape[-1])
        highest_SB = _reduced(wide_SBV.amax(-1), dist.ReduceOp.MAX)
        at_label_SB = wide_SBV.gather(-1, labels_SB1)[..., 0] - highest_SB
        at_label_SB = _reduced(at_label_SB.masked_fill_(~is_mine_SB1[..., 0], 0.0), dist.ReduceOp.SUM)
        wide_SBV.sub_(highest_SB[..., None]).exp_()
        sums_SB = _reduced(wide_SBV.sum(-1), dist.ReduceOp.SUM)
        ctx.save_for_backward(wide_SBV, sums_SB, labels_SB1, is_mine_SB1)
        return sums_SB.log() - at_label_SB

    @staticmethod
    def backward(ctx: Any, gradient_SB: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exp_SBV, sums_SB, labels_SB1, is_mine_SB1 = ctx.saved_tensors
        exp_SBV.mul_((gradient_SB / sums_SB)[..., None])
        exp_SBV.scatter_add_(-1, labels_SB1, -gradient_SB[..., None] * is_mine_SB1)
        return exp_SBV.to(ctx.dtype), None


def _own_labels(labels_SB: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """Labels [S, B, 1] among this rank's ``share`` of the vocabulary, else 0; and which they are."""
    labels_SB1 = labels_SB[..., None] - parallel_state.get_tensor_model_parallel_rank() * share
    is_mine_SB1 = (labels_SB1 >= 0) & (labels_SB1 < share)
    return labels_SB1.masked_fill(~is_mine_SB1, 0), is_mine_SB1


@torch.no_grad()
def highest_probability(logits_SBV: Tensor) -> Tensor:
    """Probability [S, B] of each position's most likely token, padding included; without gradient."""
    logits_SBV = logits_SBV.float()
    highest_SB = _reduced(logits_SBV.amax(-1), dist.ReduceOp.MAX)
    sums_SB = (logits_SBV - highest_SB[..., None]).exp_().sum(-1)
    return 1.0 / _reduced(sums_SB, dist.ReduceOp.SUM)


def distillation_loss(student_SBV: Tensor, teacher_SBV: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) [S, B] of the softmaxes at temperature T (Hinton et al. 2015).

    No gradient flows into the teacher. The factor keeps gradients of the same size at any temperature.
    """
    result: Tensor = _Distillation.apply(student_SBV, teacher_SBV, temperature)
    return result


class _Distillation(torch.autograd.Function):
    """KL divergence whose backward needs one tensor of the logits' size: d/dz = T (softmax - teacher's)."""

    @staticmethod
    def forward(ctx: Any, student_SBV: Tensor, teacher_SBV: Tensor, temperature: float) -> Tensor:
        log_p_SBV = _log_softmax(student_SBV, temperature)
        log_q_SBV = _log_softmax(teacher_SBV, temperature)
        q_SBV = log_q_SBV.exp()
        kl_SB = _reduced((q_SBV * (log_q_SBV - log_p_SBV)).sum(-1), dist.ReduceOp.SUM)
        ctx.save_for_backward(log_p_SBV.exp_().sub_(q_SBV))
        ctx.temperature, ctx.dtype = temperature, student_SBV.dtype
        return kl_SB * temperature**2

    @staticmethod
    def backward(ctx: Any, gradient_SB: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (difference_SBV,) = ctx.saved_tensors
        return (gradient_SB[..., None] * difference_SBV * ctx.temperature).to(ctx.dtype), None, None


def _log_softmax(logits_SBV: Tensor, temperature: float) -> Tensor:
    """This rank's part of the log-probabilities over the whole vocabulary, in fp32 or wider."""
    scaled_SBV = logits_SBV.detach().to(torch.promote_types(logits_SBV.dtype, torch.float32)) / temperature
    scaled_SBV -= _reduced(scaled_SBV.amax(-1), dist.ReduceOp.MAX)[..., None]
    sums_SB = _reduced(scaled_SBV.exp().sum(-1), dist.ReduceOp.SUM)
    return scaled_SBV.sub_(sums_SB.log_()[..., None])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one head says about each token; all [S, B]."""

    cross_entropy: Tensor
    """-log probability of the true token, in nats, at temperature 1."""
    predicted: Tensor
    """Most likely token (int64), the lowest of equally likely ones."""
    probability: Tensor
    """Its probability."""


@torch.no_grad()
def judge_tokens(logits_SBV: Tensor, labels_BS: Tensor, vocab_size: int) -> Judgement:
    """Judge a head by the real part of the vocabulary; the same on every tensor-parallel rank.

    Args:
        vocab_size: tokens that there are; logits beyond are padding.
    """
    first = parallel_state.get_tensor_model_parallel_rank() * logits_SBV.shape[-1]
    real = min(max(vocab_size - first, 0), logits_SBV.shape[-1])
    # A rank may hold nothing but padding; one column that can never win keeps the code below simple.
    logits_SBV = logits_SBV.float()[..., :real] if real else logits_SBV.float()[..., :1] - torch.inf
    largest_SB, local_SB = logits_SBV.max(-1)
    highest_SB = _reduced(largest_SB.clone(), dist.ReduceOp.MAX)
    mine_SB = torch.where(largest_SB == highest_SB, local_SB + first, torch.iinfo(torch.int64).max)
    predicted_SB = _reduced(mine_SB, dist.ReduceOp.MIN)
    sums_SB = _reduced((logits_SBV - highest_SB[..., None]).exp().sum(-1), dist.ReduceOp.SUM)
    labels_SB = labels_BS.t() - first
    is_mine_SB = (labels_SB >= 0) & (labels_SB < real)
    at_label_SB = logits_SBV.gather(-1, labels_SB.clamp(0, logits_SBV.shape[-1] - 1)[..., None])[..., 0]
    of_label_SB = torch.where(is_mine_SB, at_label_SB - highest_SB, 0.0)
    log_share_SB = _reduced(of_label_SB, dist.ReduceOp.SUM) - sums_SB.log()
    return Judgement(-log_share_SB, predicted_SB, 1.0 / sums_SB)


def _reduced(tensor: Tensor, op: Any) -> Tensor:
    """``tensor`` itself, reduced in place over the ranks that share the vocabulary."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, op=op, group=parallel_state.get_tensor_model_parallel_group())
    return tensor
