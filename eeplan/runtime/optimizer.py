"""megatron-core's gradient buffers, optimizer and learning-rate schedule, set up from a run.

Also keeps the gradients of tied matrices equal: every stage with a copy differentiates as if it were its own,
then the copies' gradients are summed (EE-LLM 3.1).

Gradients are averaged over data-parallel ranks first, then scaled, then tied copies are summed. All three are
linear, so their order does not matter to the result; this one works as well when the first has begun inside
the last backward, or leaves each rank with its share only (distributed optimizer).
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
from eeplan.runtime.optimizer_state import OptimizerState
from eeplan.runtime.precision import dtype_of
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping; 0 when the step was skipped."""
    learning_rate: float
    is_skipped: bool = False
    """Gradients overflowed under the loss scale: nothing was changed but the scale."""


class GradientBuffers(DistributedDataParallel):
    """megatron-core's gradient buffers, whose reduction may overlap with one backward only: the last."""

    _is_reduced = False

    def zero_grad_buffer(self) -> None:
        """Clear the buffers before an iteration."""
        super().zero_grad_buffer()
        self._is_reduced = False
        if self.ddp_config.overlap_grad_reduce:
            for group in self.bucket_groups:
                group.is_last_microbatch = False

    def expect_last_backward(self) -> None:
        """From now on a bucket is reduced as soon as all of its gradients are there."""
        for group in self.bucket_groups:
            group.is_last_microbatch = True

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce what is not yet being reduced, and wait for all; a second call in an iteration does nothing.

        After it the buffers hold means over data-parallel ranks (with the distributed optimizer, in this
        rank's stretch of each bucket).
        """
        if self._is_reduced:
            return
        if self.ddp_config.overlap_grad_reduce:
            for group in self.bucket_groups:
                if group.grad_reduce_handle is None:
                    group.start_grad_sync(force_all_reduce=force_all_reduce)
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        self._is_reduced = True


class Training:
    """Model part, gradient buffers, optimizer and learning-rate schedule of one rank."""

    def __init__(self, run: RunSpec, model: EarlyExitGPT, backend: Backend) -> None:
        self.run = run
        self.model = model
        self.device = backend.device
        self.ddp = _with_gradient_buffers(run, model)
        with cuda_names_on_cpu(backend.device):
            self.optimizer = get_megatron_optimizer(_optimizer_config(run), [self.ddp])
        self.state = OptimizerState(self.optimizer)
        self.scheduler = _learning_rate_schedule(run, self.optimizer)
        self.tied_group: Any = None
        """Process group of the stages that hold a copy of the tied matrix; None when it is alone."""
        self.gradient_scale = 1.0
        """Multiplies this stage's accumulated gradients (bubble filling, ``sim.estimator``)."""
        self.last_backward: int | None = None
        """The microbatch whose backward is the iteration's last on this stage."""

    @property
    def reduces_early(self) -> bool:
        """Whether gradients may have been reduced when the last backward ends."""
        return bool(self.ddp.ddp_config.overlap_grad_reduce)

    def zero_gradients(self) -> None:
        """Clear gradient buffers before an iteration."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def before_backward(self, microbatch: int) -> None:
        """To be told of every backward, so that the reduction can begin in the last one."""
        if microbatch == self.last_backward:
            self.ddp.expect_last_backward()

    def synchronize_gradients(self) -> None:
        """Average over data-parallel ranks, scale this stage's gradients, sum tied copies over stages.

        The scale is applied here, not to the losses: once per gradient in fp32, so that neither losses nor
        messages change, and before tied copies meet, since each stage's copy has its own scale.
        """
        finalize_model_grads([self.ddp])
        if self.gradient_scale != 1.0:
            for buffer in self.ddp.buffers:
                buffer.grad_data.mul_(self.gradient_scale)
        shared = self.model.shared_embedding_or_output_weight()
        if self.tied_group is not None and shared is not None:
            # Stages cut the matrix alike (it has a bucket of its own), so shares meet their likes.
            start, stop = self.state.held_range(shared)
            if start < stop:
                gradient: Tensor = shared.main_grad  # type: ignore[attr-defined]
                dist.all_reduce(gradient.view(-1)[start:stop], group=self.tied_group)

    def step(self) -> StepResult:
        """Clip gradients, update parameters, advance the learning rate.

        With loss scaling an overflow on any rank skips all of it on every rank, and lowers the scale.
        """
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        with cuda_names_on_cpu(self.device):
            is_done, grad_norm, _ = self.optimizer.step()
        if is_done:
            self.scheduler.step(increment=self.run.training.global_batch_size)
        return StepResult(float(grad_norm or 0.0), learning_rate, is_skipped=not is_done)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled (fp16), so that an overflow of gradients is no error."""
        return self.state.grad_scaler is not None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by in the next iteration."""
        return float(self.state.grad_scaler.scale) if self.scales_losses else 1.0

    @property
    def loss_scaling(self) -> dict[str, float] | None:
        """What the loss scale depends on, for checkpoints; None without a scale that moves."""
        if not self.scales_losses:
            return None
        state = self.state.grad_scaler.state_dict()
        return {name: float(value) for name, value in state.items()} or None

    @loss_scaling.setter
    def loss_scaling(self, state: dict[str, float] | None) -> None:
        if state is None or self.loss_scaling is None:
            return
        with cuda_names_on_cpu(self.device):
            self.state.grad_scaler.load_state_dict(
                {
                    "scale": torch.tensor([state["scale"]], dtype=torch.float32),
                    "growth_tracker": int(state["growth_tracker"]),
                    "hysteresis_tracker": int(state["hysteresis_tracker"]),
                }
            )

    @property
    def optimizer_steps(self) -> int:
        """Updates done; what Adam's bias correction counts."""
        return self.state.steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self.state.steps = steps

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
        buffers: list[Tensor] = [buffer.grad_data for buffer in self.ddp.buffers]
        return [*self.model.parameters(), *buffers, *self.state.tensors()]

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


def _with_gradient_buffers(run: RunSpec, model: EarlyExitGPT) -> GradientBuffers:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.parallel.overlap_grad_reduce,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
    )
    return GradientBuffers(model.config, config, model)


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
        fp16=training.precision == "fp16",
        params_dtype=dtype_of(training.precision),
        loss_scale=training.loss_scale if training.precision == "fp16" else None,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=training.min_loss_scale,
        loss_scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
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
