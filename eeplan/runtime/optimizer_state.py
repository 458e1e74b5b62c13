"""Adam's state and the fp32 copies of 16-bit parameters, a whole parameter at a time.

With megatron-core's distributed optimizer each data-parallel rank keeps a stretch of every gradient buffer,
cut without regard to parameters. Reading puts a parameter's stretches together, writing keeps this rank's
own, so that checkpoints look the same with and without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


@dataclass(frozen=True, slots=True)
class _Held:
    """What the optimizer updates of one parameter on this rank."""

    main: Tensor
    start: int
    stop: int
    """Elements of the flattened parameter that ``main`` holds."""


class OptimizerState:
    """State of one rank's megatron-core optimizer, by model parameter."""

    def __init__(self, optimizer: Any) -> None:
        chained = getattr(optimizer, "chained_optimizers", None)
        self._optimizer: Any = chained[0] if chained else optimizer
        self.is_distributed = hasattr(self._optimizer, "shard_fp32_groups")
        self._held = _distributed_shares(self._optimizer) if self.is_distributed else {}

    @property
    def inner(self) -> Any:
        """The torch optimizer inside megatron-core's wrappers."""
        return self._optimizer.optimizer

    @property
    def grad_scaler(self) -> Any:
        """megatron-core's loss scaler; None without loss scaling."""
        return getattr(self._optimizer, "grad_scaler", None)

    def keys(self, parameter: Tensor) -> tuple[str, ...]:
        """What there is to keep of a parameter; the same on every rank that holds it."""
        return MOMENTS if parameter.dtype == torch.float32 else (MASTER, *MOMENTS)

    def read(self, parameter: Tensor, key: str) -> Tensor:
        """The state ``key``, shaped like the parameter; fp32.

        Without the distributed optimizer it is the optimizer's own tensor. With it, it is a copy, and the
        call is collective over data-parallel ranks.
        """
        if not self.is_distributed:
            return self._tensor(self._whole(parameter), key)
        # Bits, not numbers: adding zeros would turn -0.0 into 0.0.
        bits = torch.zeros(parameter.numel(), dtype=torch.int32, device=parameter.device)
        held = self._held.get(parameter)
        if held is not None:
            bits[held.start : held.stop] = self._tensor(held, key).detach().view(torch.int32)
        dist.all_reduce(bits, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return bits.view(torch.float32).view(parameter.shape)

    def write(self, parameter: Tensor, key: str, value: Tensor) -> None:
        """Put a value shaped like the parameter where :meth:`read` finds it."""
        held = self._held.get(parameter) if self.is_distributed else self._whole(parameter)
        if held is not None:
            target = self._tensor(held, key)
            target.detach().copy_(value.flatten()[held.start : held.stop].view(target.shape))

    def held_range(self, parameter: Tensor) -> tuple[int, int]:
        """Elements of the flattened parameter that this rank updates; may be none."""
        held = self._held.get(parameter) if self.is_distributed else self._whole(parameter)
        return (held.start, held.stop) if held else (0, 0)

    @property
    def steps(self) -> int:
        """Updates done; what Adam's bias correction counts."""
        return max((int(state["step"]) for state in self._states()), default=0)

    @steps.setter
    def steps(self, steps: int) -> None:
        for state in self._states():
            state["step"].fill_(steps)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps on this rank."""
        kept: list[Tensor] = [p for group in self.inner.param_groups for p in group["params"]]
        for state in self.inner.state.values():
            kept.extend(value for value in state.values() if isinstance(value, Tensor))
        return kept

    def _tensor(self, held: _Held, key: str) -> Tensor:
        return held.main if key == MASTER else self._state(held.main)[key]

    def _states(self) -> list[dict[str, Tensor]]:
        return [self._state(p) for group in self.inner.param_groups for p in group["params"]]

    def _state(self, main: Tensor) -> dict[str, Tensor]:
        """Adam's state, made as zeros where no step has been done yet."""
        state: dict[str, Tensor] = self.inner.state[main]
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(main, memory_format=torch.preserve_format, requires_grad=False)
        state.setdefault("step", torch.tensor(0.0))
        return state

    @staticmethod
    def _whole(parameter: Tensor) -> _Held:
        return _Held(getattr(parameter, "main_param", parameter), 0, parameter.numel())


def _distributed_shares(optimizer: Any) -> dict[Tensor, _Held]:
    """Of megatron-core's DistributedOptimizer: which stretch of which parameter this rank keeps."""
    shares: dict[Tensor, _Held] = {}
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for model_groups, shard_groups in pairs:
        for parameters, mains in zip(model_groups, shard_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                place = optimizer._get_model_param_range_map(parameter)["param"]
                shares[parameter] = _Held(main, place.start, place.end)
    return shares
