"""Tensor-parallel shares of a parameter: cutting a whole one, and putting shares together.

megatron-core cuts along ``partition_dim``; the first MLP matrix holds gate and up halves, and each rank gets
its share of both. (Its attention matrix needs no such care: it is laid out by query group.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def share_of(whole: Tensor, name: str, parameter: Tensor) -> Tensor:
    """This rank's share of a whole parameter; ``parameter`` carries megatron-core's partition attributes."""
    if not _is_cut(parameter):
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    axis = parameter.partition_dim  # type: ignore[attr-defined]
    if _is_gated(name):
        halves = whole.chunk(2, dim=axis)
        return torch.cat([half.chunk(size, dim=axis)[rank] for half in halves], dim=axis)
    return whole.chunk(size, dim=axis)[rank]


def whole_shape(parameter: Tensor) -> list[int]:
    """Shape of the whole parameter that ``parameter`` is a share of."""
    shape = list(parameter.shape)
    if _is_cut(parameter):
        shape[parameter.partition_dim] *= (  # type: ignore[attr-defined]
            parallel_state.get_tensor_model_parallel_world_size()
        )
    return shape


def gather_whole(share: Tensor, name: str, parameter: Tensor) -> Tensor:
    """The whole parameter (or anything shaped like it), gathered over tensor-parallel ranks; collective."""
    if not _is_cut(parameter):
        return share
    size = parallel_state.get_tensor_model_parallel_world_size()
    shares = [torch.empty_like(share) for _ in range(size)]
    dist.all_gather(shares, share.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    axis = parameter.partition_dim  # type: ignore[attr-defined]
    if _is_gated(name):
        halves = [s.chunk(2, dim=axis) for s in shares]
        return torch.cat([half[i] for i in (0, 1) for half in halves], dim=axis)
    return torch.cat(shares, dim=axis)


def _is_cut(parameter: Tensor) -> bool:
    cut = getattr(parameter, "tensor_model_parallel", False)
    return bool(cut) and parallel_state.get_tensor_model_parallel_world_size() > 1


def _is_gated(name: str) -> bool:
    return name.endswith("linear_fc1.weight")
