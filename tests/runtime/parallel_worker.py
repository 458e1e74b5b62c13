"""Trains small models in many layouts, one process group for all: the ranks of test_parallel and its kin.

``main`` gets a folder that holds ``cases.pt``, and leaves ``out.pt`` there. :func:`run_case` also runs
in a test's own process, as the layout of one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from eeplan.errors import TrainingError
from eeplan.plan import Plan
from eeplan.runtime.backend import cuda_names_on_cpu, stop
from eeplan.runtime.checkpoint_state import load_tensors
from eeplan.runtime.executor import IterationRecord
from eeplan.runtime.guard import Guard
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.sharding import gather_whole
from eeplan.runtime.stage import Batch
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Work:
    """One training run."""

    plan: Plan
    steps: int
    seed_checkpoint: str
    """Folder of the parameters to begin with."""
    overflow: tuple[int, int] | None = None
    """(rank, iteration) whose gradients are to hold an infinity."""


@dataclass(slots=True)
class Outcome:
    """What a run came to, on rank 0."""

    losses: list[dict[str, float]] = field(default_factory=list)
    """Mean of every head, by step."""
    differing: list[str] = field(default_factory=list)
    """Parameters whose copies were not bitwise equal after some step."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of every whole parameter at the end."""
    skipped: list[bool] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    """Before each step."""
    error: str = ""
    """Why the last step was not done."""
    num_copies: int = 0
    """Tensors compared after each step."""


def text_of(run: RunSpec, iteration: int, count: int) -> dict[str, Tensor]:
    """Microbatches [count, B, S] of an iteration, those of all data-parallel ranks in order; some masked."""
    generator = torch.Generator().manual_seed(1000 + iteration)
    shape = (count, run.training.micro_batch_size, run.training.seq_length)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) > 0.1).float()
    return {"tokens": tokens, "labels": tokens.roll(-1, dims=-1), "loss_mask": mask}


def layout_of(plan: Plan) -> tuple[int, int]:
    """Tensor- and pipeline-parallel sizes."""
    parallel = plan.run.parallel
    return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size


def run_case(work: Work) -> Outcome:
    """Train; collective over all ranks."""
    # Many groups of many ranks take longer to make than a small model takes to train.
    if parallel_state.model_parallel_is_initialized() and layout_of(work.plan) != (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    ):
        parallel_state.destroy_model_parallel()
    rank = set_up(work.plan)
    load_tensors(Path(work.seed_checkpoint), rank.model, None)
    with cuda_names_on_cpu(rank.backend.device):
        rank.training.optimizer.reload_model_params()
    outcome = Outcome()
    for iteration in range(1, work.steps + 1):
        rank.begin_iteration(iteration)
        outcome.loss_scales.append(rank.training.loss_scale)
        batches = _batches(rank, iteration)
        if work.overflow == (rank.backend.rank, iteration):
            # Gradients are added to it.
            next(rank.model.parameters()).main_grad.view(-1)[0] = float("inf")
        record = rank.executor.run(batches.__getitem__)
        try:
            Guard().check(iteration, record, rank.training, _names(rank.plan))
        except TrainingError as error:
            outcome.error = str(error)
            break
        rank.training.synchronize_gradients()
        step = rank.training.step()
        outcome.skipped.append(step.is_skipped)
        outcome.grad_norms.append(step.grad_norm)
        outcome.losses.append(_mean_losses(rank, record))
        outcome.num_copies, differing = _compare_copies(rank)
        outcome.differing += [f"{name} after step {iteration}" for name in differing]
    outcome.digests = _whole_digests(rank)
    _drop_groups(rank)
    return outcome


def _drop_groups(rank: Rank) -> None:
    """Every gloo group keeps threads that poll: hundreds of cases would drown the machine in them."""
    for group in (rank.channels.forward_group, rank.channels.backward_group, rank.training.tied_group):
        if group is not None:
            dist.destroy_process_group(group)


def _batches(rank: Rank, iteration: int) -> list[Batch]:
    count = rank.schedule.num_microbatches
    data = text_of(rank.plan.run, iteration, count * rank.backend.data_size)
    mine = slice(rank.backend.data_rank * count, (rank.backend.data_rank + 1) * count)
    tokens, labels, mask = (data[key][mine] for key in ("tokens", "labels", "loss_mask"))
    positions = torch.arange(tokens.shape[-1]).expand(tokens.shape[1:]).contiguous()
    return [Batch(tokens[m], labels[m], mask[m], positions) for m in range(count)]


def _names(plan: Plan) -> list[str]:
    return [f"exit_{exit_.depth}" for exit_ in plan.exits] + ["final"]


def _mean_losses(rank: Rank, record: IterationRecord) -> dict[str, float]:
    names = _names(rank.plan)
    found: list[Any] = [None] * rank.backend.world_size
    mine = {name: [float(losses[name]) for losses in record.losses if name in losses] for name in names}
    dist.all_gather_object(found, mine)
    every = {name: [loss for one in found for loss in one[name]] for name in names}
    return {name: sum(losses) / len(losses) for name, losses in every.items()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _compare_copies(rank: Rank) -> tuple[int, list[str]]:
    """How many tensors there are in all, and which differ although they should be the same.

    Data-parallel replicas, parameters that are not cut over tensor-parallel ranks, and tied copies on several
    stages have the same name here and must have the same bits.
    """
    mine: list[tuple[str, str]] = []
    for name, parameter in rank.model.named_global_parameters():
        cut = getattr(parameter, "tensor_model_parallel", False)
        mine.append((f"{name} of {rank.backend.tensor_rank}" if cut else name, _digest(parameter)))
    gathered: list[Any] = [None] * rank.backend.world_size
    dist.all_gather_object(gathered, mine)
    seen: dict[str, set[str]] = {}
    for name, digest in (pair for one in gathered for pair in one):
        seen.setdefault(name, set()).add(digest)
    return sum(map(len, gathered)), [name for name, digests in seen.items() if len(digests) > 1]


def _whole_digests(rank: Rank) -> dict[str, str]:
    mine = {
        name: _digest(gather_whole(parameter.detach(), name, parameter))
        for name, parameter in rank.model.named_global_parameters()
    }
    gathered: list[Any] = [None] * rank.backend.world_size
    dist.all_gather_object(gathered, mine)
    return {name: digest for one in gathered for name, digest in one.items()}


def main(folder: Path) -> None:
    """Run all cases; rank 0 saves what they came to after each."""
    outcomes = []
    for work in torch.load(folder / "cases.pt", weights_only=False):
        outcomes.append(asdict(run_case(work)))
        if dist.get_rank() == 0:
            torch.save(outcomes, folder / "out.pt")
    stop()
