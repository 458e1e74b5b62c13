"""megatron-core's gradient buffers, optimizer and learning-rate schedule, set up from a run.

Also keeps the gradients of tied matrices equal: every stage with a copy differentiates as if it were its own,
then the copies' gradients are summed (EE-LLM 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from eeplan.runtime.backend import Backend, cuda_names_on_cpu
from eeplan.runtime.memory import storage_bytes
from eeplan.runtime.model import EarlyExitGPT, StageSpec
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    learning_rate: float


class Training:
    """Model part, gradient buffers, optimizer and learning-rate schedule of one rank."""

    def __init__(self, run: RunSpec, model: EarlyExitGPT, backend: Backend) -> None:
        self.run = run
        self.model = model
        self.device = backend.device
        self.ddp = _with_gradient_buffers(model)
        with cuda_names_on_cpu(backend.device):
            self.optimizer = get_megatron_optimizer(_optimizer_config(run), [self.ddp])
        self.scheduler = _learning_rate_schedule(run, self.optimizer)
        self.tied_group: Any = None
        """Process group of the stages that hold a copy of the tied matrix; None when it is alone."""
        self.gradient_scale = 1.0
        """Multiplies this stage's accumulated gradients (bubble filling, ``sim.estimator``)."""

    def zero_gradients(self) -> None:
        """Clear gradient buffers before an iteration."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def synchronize_gradients(self) -> None:
        """Scale this stage's gradients, sum tied copies over stages, average over data-parallel ranks.

        The scale is applied here, not to the losses: once per gradient in fp32, so that neither losses nor
        messages change, and before tied copies meet, since each stage's copy has its own scale.
        """
        if self.gradient_scale != 1.0:
            for buffer in self.ddp.buffers + self.ddp.expert_parallel_buffers:
                buffer.grad_data.mul_(self.gradient_scale)
        shared = self.model.shared_embedding_or_output_weight()
        if self.tied_group is not None and shared is not None:
            dist.all_reduce(shared.main_grad, group=self.tied_group)  # type: ignore[attr-defined]
        finalize_model_grads([self.ddp])

    def step(self) -> StepResult:
        """Clip gradients, update parameters, advance the learning rate."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        with cuda_names_on_cpu(self.device):
            _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.run.training.global_batch_size)
        return StepResult(float(grad_norm or 0.0), learning_rate)

    @staticmethod
    def main_parameter(parameter: Tensor) -> Tensor:
        """What the optimizer updates: the parameter's fp32 copy in bf16, else the parameter itself."""
        main: Tensor = getattr(parameter, "main_param", parameter)
        return main

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Adam's state of a parameter, made as zeros where no step has been done yet."""
        main = self.main_parameter(parameter)
        state: dict[str, Tensor] = _inner_optimizer(self.optimizer).state[main]
        for key in ("exp_avg", "exp_avg_sq"):
            state.setdefault(key, torch.zeros_like(main, memory_format=torch.preserve_format))
        state.setdefault("step", torch.tensor(0.0))
        return state

    @property
    def optimizer_steps(self) -> int:
        """Updates done; what Adam's bias correction counts."""
        return max((int(self.moments(p)["step"]) for p in self.model.parameters()), default=0)

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        for parameter in self.model.parameters():
            self.moments(parameter)["step"].fill_(steps)

    @property
    def learning_rate_steps(self) -> int:
        """Samples by which the learning-rate schedule has advanced."""
        return int(self.scheduler.num_steps)

    @learning_rate_steps.setter
    def learning_rate_steps(self, samples: int) -> None:
        self.scheduler.num_steps = samples
        # Of nothing: sets the learning rate and the weight decay that belong to the position.
        self.scheduler.step(increment=0)

    def state_tensors(self) -> list[Tensor]:
        """Every long-lived tensor of this rank: parameters, gradient buffers, optimizer state."""
        tensors: list[Tensor] = list(self.model.parameters())
        for buffer in self.ddp.buffers + self.ddp.expert_parallel_buffers:
            tensors.append(buffer.grad_data)
        for group in self.optimizer.param_groups:
            tensors.extend(group["params"])
        for state in _inner_optimizer(self.optimizer).state.values():
            tensors.extend(value for value in state.values() if isinstance(value, Tensor))
        return tensors

    def state_bytes(self) -> int:
        """Bytes of :meth:`state_tensors`, shared storages once."""
        return storage_bytes(self.state_tensors())


def tied_ranks(stages: tuple[StageSpec, ...], run: RunSpec, pipeline_ranks: list[int]) -> list[int]:
    """Global ranks of one pipeline whose stages hold a copy of the tied matrix."""
    return [rank for rank, stage in zip(pipeline_ranks, stages, strict=True) if stage.holds_tied_matrix(run)]


def make_tied_group(stages: tuple[StageSpec, ...], run: RunSpec) -> Any:
    """Process group of this rank's tied copies, or None if it holds none or the only one.

    Collective over all ranks: every rank creates every pipeline's group.
    """
    mine: Any = None
    for ranks in _all_pipelines():
        members = tied_ranks(stages, run, ranks)
        if len(members) < 2:
            continue
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine


def _all_pipelines() -> list[list[int]]:
    """Global ranks of each pipeline, the same list on every rank."""
    pipelines: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(
        pipelines, dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    )
    return [list(ranks) for ranks in sorted({tuple(ranks) for ranks in pipelines if ranks is not None})]


def _with_gradient_buffers(model: EarlyExitGPT) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, config, model)


def _optimizer_config(run: RunSpec) -> OptimizerConfig:
    training = run.training
    return OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=training.precision == "bf16",
        params_dtype=torch.bfloat16 if training.precision == "bf16" else torch.float32,
    )


def _learning_rate_schedule(run: RunSpec, optimizer: Any) -> OptimizerParamScheduler:
    training = run.training
    batch = training.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters * batch,
        lr_decay_steps=training.train_iters * batch,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.train_iters * batch,
        wd_incr_style="constant",
    )


def _inner_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside megatron-core's wrappers."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return (chained[0] if chained else optimizer).optimizer
