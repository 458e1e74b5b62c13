"""Going on from a checkpoint is bitwise going on; nothing that matters may be missing from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan
from ranks import run_ranks
from small_data import build_small, run_for

from eeplan.plan import write_plan

ITERATIONS = 20
CASES = {
    "one process, fp32": {"parallel__pipeline_model_parallel_size": 1},
    "two stages, fp16": {
        "training__precision": "fp16",
        "training__initial_loss_scale": 2.0**12,
        "training__loss_scale_window": 3,
    },
}


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw: uninterrupted, resumed after every iteration, resumed with a part left out."""
    folder = tmp_path_factory.mktemp("resume")
    plan = plan_in(folder, **CASES[request.param])
    files = [folder / name for name in ("plan.yaml", "checkpoints", "seen")]
    run_ranks("resume_worker", files, nproc=plan.run.parallel.world_size)
    return [
        json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(plan.run.parallel.world_size)
    ]


def plan_in(folder: Path, **overrides: Any) -> Any:
    """Two exits, loss weights that ramp over the whole run, clipping and decay on."""
    settings: dict[str, Any] = {
        "model__num_layers": 4,
        "model__hidden_size": 16,
        "model__num_attention_heads": 2,
        "training__global_batch_size": 4,
        "training__seq_length": 16,
        "training__train_iters": ITERATIONS,
        "training__lr": 0.01,
        "training__lr_warmup_iters": 3,
        "exits": {
            "layers": [{"layer": 1}, {"layer": 3, "head": "mlp"}],
            "loss_weights": {"warmup": {"style": "linear", "init": 0.1, "iters": 25}},
        },
    }
    plan = make_plan(run_for(build_small(folder), **(settings | overrides)))
    return write_plan(folder / "plan.yaml", plan)


def test_every_step_is_the_same_after_a_resume(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        assert len({json.dumps(step) for step in seen["whole"]}) == ITERATIONS, "the run moves"
        for iteration in range(1, ITERATIONS):
            after = seen["resumed"][str(iteration)]
            assert after, "something ran"
            assert after == seen["whole"][iteration : iteration + len(after)], (rank, iteration)


def test_leaving_anything_out_is_noticed(ranks: list[dict[str, Any]]) -> None:
    """After one more step from iteration 5 the weights differ, whatever was not restored."""
    expected = [seen["whole"][5]["weights"] for seen in ranks]
    is_half = len(ranks) == 2
    for name in ranks[0]["forgot"]:
        weights = [seen["forgot"][name][0]["weights"] for seen in ranks]
        if name in ("master copies", "loss scale") and not is_half:
            assert weights == expected, "fp32 has none"
        elif name in ("weights", "loss scale") and is_half:
            parts = [seen["forgot"][name][0] for seen in ranks]
            assert parts != [seen["whole"][5] for seen in ranks], "the gradient or the next scale was another"
        else:
            assert weights != expected, name
