"""What every rank agrees on before parameters change: all numbers are finite, and whether to stop.

One tiny all-reduce per iteration carries both, between the last backward and the gradient synchronisation. A
loss or gradient that is not finite on any rank ends training on all of them with every parameter as it was; a
signal on any rank makes all of them save after the same iteration. With loss scaling (fp16) a gradient that
is not finite is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from eeplan.errors import TrainingError
from eeplan.runtime.executor import IterationRecord
from eeplan.runtime.optimizer import Training


class Guard:
    """Checks an iteration on all ranks before its gradients are used.

    Args:
        stop_is_requested: asked once an iteration on every rank.
    """

    def __init__(self, stop_is_requested: Callable[[], bool] = lambda: False) -> None:
        self._stop_is_requested = stop_is_requested
        self.stops = False
        """Whether all ranks end after this iteration, as last agreed."""

    def check(self, iteration: int, record: IterationRecord, training: Training, names: list[str]) -> None:
        """Agree with all ranks; collective.

        Args:
            names: of losses, in the order in which one of several bad ones is named.

        Raises:
            TrainingError: on every rank with the same words; names head, rank and iteration.
        """
        if training.reduces_early:
            # It has begun: nobody may look at a buffer, or give up, before it is done on all ranks.
            training.ddp.finish_grad_sync()
        rank, size = dist.get_rank(), dist.get_world_size()
        finding, is_loss = _non_finite(record, training, names)
        # A bad loss says more than a bad gradient, which may have come with a message.
        code = 2 * size if finding is None else rank if is_loss else size + rank
        stops = self._stop_is_requested()
        if size > 1:
            agreed = torch.tensor([code, -int(stops)], dtype=torch.int64, device=training.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            code, stops = int(agreed[0]), bool(agreed[1])
        self.stops = stops
        if code == 2 * size:
            return
        source = code % size
        words: list[Any] = [finding]
        if size > 1:
            dist.broadcast_object_list(words, src=source)
        raise TrainingError(
            f"{words[0]} on rank {source} in iteration {iteration} is not finite; no parameter was changed; "
            "lower training.lr, or go on from an earlier checkpoint with other data"
        )


def _non_finite(record: IterationRecord, training: Training, names: list[str]) -> tuple[str | None, bool]:
    """What is not finite on this rank, and whether it is a loss; None when all is well."""
    losses = [(name, loss) for of_one in record.losses for name, loss in of_one.items()]
    if losses and not bool(torch.isfinite(torch.stack([loss for _, loss in losses])).all()):
        bad = {name for name, loss in losses if not bool(torch.isfinite(loss))}
        return f"the loss of {min(bad, key=names.index)}", True
    if training.scales_losses:
        # An overflow is expected now and then; the optimizer skips the step and lowers the scale.
        return None, False
    where = ""
    if training.reduces_early and parallel_state.get_data_parallel_world_size() > 1:
        where = " (a sum over data-parallel ranks)"
    for buffer in training.ddp.buffers:
        # One pass without a temporary; only a sum that overflows or is bad needs a closer look.
        if not bool(torch.isfinite(buffer.grad_data.sum())):
            for name, parameter in training.model.named_global_parameters():
                if not _is_finite(parameter.main_grad):  # type: ignore[attr-defined]
                    return f"the gradient of {name}{where}", False
    return None, False


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
