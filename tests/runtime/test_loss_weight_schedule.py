"""The weights of the early losses change from iteration to iteration as the plan says."""

from __future__ import annotations

import pytest
import torch
from builders import make_plan, make_run

from eeplan.plan import Plan
from eeplan.runtime import backend, loop
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.stage import loss_weights
from eeplan.spec import WeightSchedule

SCHEDULE = WeightSchedule(style="linear", init=0.0, iters=2)


def scheduled_plan(schedule: WeightSchedule | None) -> Plan:
    run = make_run(
        parallel={"pipeline_model_parallel_size": 1},
        model={"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50},
        training={"micro_batch_size": 2, "global_batch_size": 4, "seq_length": 8, "train_iters": 4},
        exits={"layers": [{"layer": 2, "head": "norm", "weight": 0.4}]},
    )
    return make_plan(run).model_copy(update={"loss_weight_schedule": schedule})


class SameMicrobatch:
    """A stream that has the same microbatch at every position."""

    def __init__(self) -> None:
        tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(3))
        self.microbatch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(2, 8),
            "position_ids": torch.arange(8).expand(2, 8).contiguous(),
        }

    def read(self, position: int) -> dict[str, torch.Tensor]:
        return self.microbatch

    def advance(self, microbatches: int) -> None:
        """It stays the same."""


def gradient_of_the_exit_norm(rank: Rank) -> float:
    """Largest gradient of what only the exit's loss can reach."""
    return float(rank.model.exits["2"].norm.weight.main_grad.abs().max())


def test_weights_follow_the_schedule() -> None:
    plan = scheduled_plan(SCHEDULE)
    assert [loss_weights(plan, iteration)["exit_2"] for iteration in (1, 2, 3, 9)] == [0.0, 0.2, 0.4, 0.4]
    assert {loss_weights(plan, iteration)["final"] for iteration in (1, 2, 3)} == {1.0}
    assert loss_weights(scheduled_plan(None), 1)["exit_2"] == 0.4


@pytest.mark.parametrize("schedule", [SCHEDULE, None])
def test_the_training_loop_applies_them(
    one_process: backend.Backend, schedule: WeightSchedule | None
) -> None:
    rank = set_up(scheduled_plan(schedule))
    stream, seen = SameMicrobatch(), []
    for iteration in (1, 2, 3):
        loop._train_step(rank, stream, iteration)  # type: ignore[arg-type]
        seen.append((rank.computation.weights["exit_2"], gradient_of_the_exit_norm(rank) > 0))
    warming_up = [(0.0, False), (0.2, True), (0.4, True)]
    assert seen == (warming_up if schedule else [(0.4, True)] * 3)
