"""megatron-core's own 1F1B schedule on a model part of ours: what the executor is held against.

The model is called as Megatron-LM's training script calls it: ``GPTModel.forward`` inside megatron-core's
``DistributedDataParallel``, a loss function over unmasked tokens, outputs deallocated once they are sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from eeplan.runtime.setup import Rank
from eeplan.runtime.stage import Batch


def run_stock_schedule(rank: Rank, batches: Sequence[Batch]) -> list[Tensor]:
    """Forward and backward of all microbatches by the stock schedule; gradients add up in the same buffers.

    Args:
        rank: without exits and without tied matrices, which only our own synchronisation reduces.

    Returns:
        The final loss of each microbatch on the last stage; none on others.
    """
    losses: list[Tensor] = []

    def forward_step(source: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(source)
        output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)

        def loss_function(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (losses_BS * batch.loss_mask).sum() / batch.loss_mask.sum()
            losses.append(loss.detach().clone())
            return loss, {}

        return output, loss_function

    training = rank.plan.run.training
    with _schedules_on(rank.backend.device):
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=rank.training.ddp,
            num_microbatches=rank.plan.num_microbatches,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
    return losses


@contextlib.contextmanager
def _schedules_on(device: torch.device) -> Iterator[None]:
    """Let the schedules' literal "cuda" mean ``device`` meanwhile.

    ``backend.cuda_names_on_cpu`` would do it as well, but slows every torch call down, and with it the
    schedule that is to be timed.
    """
    if device.type == "cuda":
        yield
        return
    module: Any = schedules
    module.torch = _TorchOn(device)
    try:
        yield
    finally:
        module.torch = torch


class _TorchOn:
    """``torch`` with zeros made on a given device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **settings: Any) -> Tensor:
        """``torch.zeros`` on the device, whatever was asked for."""
        return torch.zeros(*size, **(settings | {"device": self._device}))
