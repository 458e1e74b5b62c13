"""Worker of test_gradients: one iteration of each case on real ranks; rank 0 saves losses and gradients.

``main`` gets a file of cases (see ``test_gradients.Case``) and an output file.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import make_plan
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import forget_layout
from torch import Tensor

from eeplan.runtime.backend import cuda_names_on_cpu, stop
from eeplan.runtime.losses import mean_cross_entropy
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.sharding import gather_whole, share_of
from eeplan.runtime.stage import FINAL, Batch
from eeplan.schema import validate
from eeplan.spec import RunSpec


def batches_of(data: dict[str, Any], rank: Rank) -> list[Batch]:
    """This data-parallel rank's microbatches out of those of the whole iteration."""
    count = rank.schedule.num_microbatches
    mine = slice(rank.backend.data_rank * count, (rank.backend.data_rank + 1) * count)
    tokens, labels, mask = data["tokens"][mine], data["labels"][mine], data["loss_mask"][mine]
    positions = torch.arange(tokens.shape[-1]).expand(tokens.shape[1:]).contiguous()
    if data.get("swap_labels_on") == rank.backend.pipeline_rank:
        labels = labels[[1, 0, *range(2, count)]]
    return [Batch(tokens[m], labels[m], mask[m], positions) for m in range(count)]


def load(rank: Rank, parameters: dict[str, Tensor]) -> None:
    """Put the reference's parameters into this rank's part of the model."""
    with torch.no_grad():
        for name, parameter in rank.model.named_global_parameters():
            parameter.copy_(share_of(parameters[name], name, parameter))


def run_own(rank: Rank, batches: list[Batch]) -> dict[str, Tensor]:
    """Our executor; mean loss per head of this stage."""
    record = rank.executor.run(lambda microbatch: batches[microbatch])
    names = record.losses[0].keys()
    return {name: torch.stack([losses[name] for losses in record.losses]).mean() for name in names}


class StockStage(torch.nn.Module):
    """A stage without exits in the form that megatron-core's schedules expect."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self.config = rank.model.config
        self.model_type = rank.model.model_type
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        """Called by the schedule before each forward."""
        self.received = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states, or the mean loss on the last stage."""
        model, stage = self.rank.model, self.rank.stage
        hidden = model.embed(batch.tokens, batch.position_ids) if stage.is_first else self.received
        rotary = model.rotary(batch.tokens.shape[1])
        hidden = model.run_layers(hidden, rotary, stage.first_layer - 1, stage.last_layer)
        if not stage.is_last:
            return hidden
        return mean_cross_entropy(model.final_logits(hidden), batch.labels, batch.loss_mask)


def run_stock(rank: Rank, batches: list[Batch]) -> dict[str, Tensor]:
    """megatron-core's own 1F1B schedule on the same model part, which has no exits."""
    losses: list[Tensor] = []

    def loss_function(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses.append(loss.detach().clone())
        return loss, {}

    def forward_step(order: Any, model: Any) -> tuple[Tensor, Any]:
        return model(next(order)), loss_function

    training = rank.plan.run.training
    with cuda_names_on_cpu(rank.backend.device):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=StockStage(rank),
            num_microbatches=rank.plan.num_microbatches,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
    return {FINAL: torch.stack(losses).mean()} if losses else {}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Losses and synchronised gradients of this rank's pipeline stage, under global names."""
    run = validate(case["run"], RunSpec, "case")
    # Cases of one world size differ in layout.
    forget_layout()
    rank = set_up(make_plan(run))
    load(rank, case["parameters"])
    rank.training.zero_gradients()
    step = run_stock if case["executor"] == "stock" else run_own
    losses = step(rank, batches_of(case["data"], rank))
    before_sync = {
        name: parameter.main_grad.clone() for name, parameter in rank.model.named_global_parameters()
    }
    rank.training.synchronize_gradients()
    gradients = {
        name: gather_whole(parameter.main_grad.clone(), name, parameter)
        for name, parameter in rank.model.named_global_parameters()
    }
    return {"losses": losses, "gradients": gradients, "before_sync": before_sync}


def main(cases_file: Path, out_file: Path) -> None:
    """Run all cases, gather each on rank 0, save."""
    results = []
    for case in torch.load(cases_file, weights_only=False):
        mine = run_case(case)
        here = (parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((here, mine), gathered, dst=0)
        results.append(gathered)
    if dist.get_rank() == 0:
        torch.save(results, out_file)
    stop()
