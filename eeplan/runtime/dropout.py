"""Dropout masks as a function of where they are used, not of what was drawn before.

Before every layer the random generators are seeded from (run seed, iteration, data-parallel rank, microbatch,
layer). So a mask is the same whether the layer runs for the first time or is recomputed, in the forward step
or in the backward step, on this stage or on another, and after a resume. As in Megatron, tensor-parallel
ranks share the masks of hidden states that they all hold, and draw their own for attention heads and for
their shares of the sequence.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

TRACKER_STATE = "model-parallel-rng"
"""megatron-core's name for the generator that differs over tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class DropoutPlace:
    """Which microbatch's masks are to be drawn."""

    seed: int
    iteration: int
    data_rank: int
    microbatch: int


@contextlib.contextmanager
def masks_of(place: DropoutPlace | None, layer: str, *, sequence_parallel: bool) -> Iterator[None]:
    """Inside, dropout draws the masks of ``layer`` at ``place``; without a place nothing is seeded.

    Args:
        layer: a name that is the layer's own in the whole model, not in the stage.
        sequence_parallel: hidden states are shares of the sequence, and so are their masks.
    """
    if place is not None:
        where = f"{place.seed}:{place.iteration}:{place.data_rank}:{place.microbatch}:{layer}"
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        tracker = get_cuda_rng_tracker()
        torch.manual_seed(_number(f"{where}:own:{tensor_rank}"))
        tracker.set_states({**tracker.get_states(), TRACKER_STATE: torch.cuda.get_rng_state()})
        torch.manual_seed(_number(f"{where}:hidden:{tensor_rank if sequence_parallel else 0}"))
    yield


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
