"""Everything one rank needs to execute a plan, put together in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from eeplan.plan import Plan
from eeplan.runtime.backend import Backend, start
from eeplan.runtime.clock import Clock
from eeplan.runtime.executor import Channels, Executor
from eeplan.runtime.model import EarlyExitGPT, StageSpec, build_model, stage_specs
from eeplan.runtime.optimizer import Training, make_tied_group
from eeplan.runtime.precision import dtype_of
from eeplan.runtime.stage import StageComputation, loss_weights, partial_microbatches
from eeplan.sim.estimator import check_estimator, corrections_of
from eeplan.sim.fill import fill_of, schedule_of
from eeplan.sim.schedule import Op, Schedule
from eeplan.sim.validators import validate
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, ready to run iterations."""

    plan: Plan
    backend: Backend
    stage: StageSpec
    model: EarlyExitGPT
    training: Training
    computation: StageComputation
    channels: Channels
    executor: Executor
    schedule: Schedule
    clock: Clock

    def begin_iteration(self, iteration: int) -> None:
        """Clear gradients, and set what changes from one iteration (from 1) to the next."""
        self.training.zero_gradients()
        self.computation.weights = loss_weights(self.plan, iteration)
        self.computation.iteration = iteration
        self.computation.loss_scale = self.training.loss_scale


def start_backend(run: RunSpec) -> Backend:
    """Join the process group with the run's parallel layout."""
    return start(
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=run.parallel.pipeline_model_parallel_size,
        # Tied copies may live on any stage; eeplan reduces them itself (optimizer.make_tied_group).
        embedding_ranks=lambda ranks: list(ranks)[:1],
    )


def set_up(plan: Plan) -> Rank:
    """Build this rank's part of ``plan``; collective over all ranks.

    Raises:
        ScheduleError: the schedule would deadlock, mispair microbatches, miscount them, or bias the gradient.
    """
    schedule = schedule_of(plan)
    validate(schedule)
    check_estimator(schedule, plan)
    backend = start_backend(plan.run)
    stages = stage_specs(plan)
    stage = stages[backend.pipeline_rank]
    model = build_model(plan.run, stage, backend)
    training = Training(plan.run, model, backend)
    training.tied_group = make_tied_group(stages, plan.run)
    scales = corrections_of(plan).gradient_scales
    training.gradient_scale = scales[backend.pipeline_rank]
    computation = StageComputation(
        model,
        loss_weights(plan, 1),
        plan.exit_forward,
        fill_of(plan).num_full,
        partial_microbatches(schedule, scales, backend.pipeline_rank),
    )
    backwards = [i.microbatch for i in schedule.stages[backend.pipeline_rank] if i.op is Op.BACKWARD]
    training.last_backward = backwards[-1]
    computation.before_backward = training.before_backward
    channels = make_channels(plan.run, backend)
    clock = Clock(backend.device)
    executor = Executor(schedule, backend.pipeline_rank, computation, channels, clock)
    return Rank(plan, backend, stage, model, training, computation, channels, executor, schedule, clock)


def make_channels(run: RunSpec, backend: Backend) -> Channels:
    """Process groups and neighbours for messages between stages; collective over all ranks."""
    forward_group, backward_group = dist.new_group(), dist.new_group()
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    here = backend.pipeline_rank
    training = run.training
    # With sequence parallelism every tensor-parallel rank sends its share of the positions.
    shares = run.parallel.tensor_model_parallel_size if run.parallel.sequence_parallel else 1
    positions, size = training.seq_length // shares, training.micro_batch_size
    # What the final exit says travels backward with the gradient (stage.StageComputation.backward).
    back = 2 * positions if run.exits.distillation else positions
    return Channels(
        forward_group=forward_group,
        backward_group=backward_group,
        previous_rank=pipeline[here - 1] if here > 0 else None,
        next_rank=pipeline[here + 1] if here + 1 < len(pipeline) else None,
        message_shape=(positions, size, run.model.hidden_size),
        gradient_shape=(back, size, run.model.hidden_size),
        dtype=dtype_of(training.precision),
        device=backend.device,
    )
