"""A checkpoint in other layouts holds the same numbers; and a NaN on one rank stops all of them in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan
from ranks import run_ranks
from small_data import build_small, run_for

from eeplan.plan import write_plan


def seen_by_ranks(folder: Path, layouts: Sequence[str], nproc: int, precision: str) -> list[dict[str, Any]]:
    """``layouts`` as pipeline x tensor x data sizes, e.g. 2x1x1.

    A letter after it: s for sequence parallelism, d for the distributed optimizer with early reduction.
    """
    files = build_small(folder)
    for layout in set(layouts):
        pipeline, tensor, data = map(int, layout.rstrip("sd").split("x"))
        run = run_for(
            files,
            model__num_layers=4,
            model__hidden_size=32,
            parallel={
                "pipeline_model_parallel_size": pipeline,
                "tensor_model_parallel_size": tensor,
                "data_parallel_size": data,
                "sequence_parallel": layout.endswith("s"),
                "use_distributed_optimizer": layout.endswith("d"),
                "overlap_grad_reduce": layout.endswith("d"),
            },
            training__seq_length=16,
            training__train_iters=8,
            training__precision=precision,
            exits={"layers": [{"layer": 1, "head": "mlp"}, {"layer": 3, "head": "block", "tied": False}]},
        )
        write_plan(folder / f"{layout}.yaml", make_plan(run))
    run_ranks("reshard_worker", [folder, *layouts], nproc=nproc)
    return [json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(nproc)]


def check_layouts(ranks: list[dict[str, Any]], layouts: Sequence[str]) -> None:
    states = []
    for number in range(len(layouts)):
        whole: dict[str, str] = {}
        for seen in ranks:
            digests, position = seen["layouts"][number]
            assert position == ranks[0]["layouts"][0][1], layouts[number]
            for key, digest in digests.items():
                assert whole.setdefault(key, digest) == digest, (layouts[number], key)
        states.append(whole)
    assert len(states[0]) > 60
    for layout, state in zip(layouts, states, strict=True):
        assert state.keys() == states[0].keys()
        different = [key for key in state if state[key] != states[0][key]]
        assert not different, (layout, different[:3])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return seen_by_ranks(tmp_path_factory.mktemp("two"), TWO, 2, "bf16")


TWO = ("2x1x1", "1x2x1s", "1x1x2d", "1x1x2", "2x1x1")
FOUR = ("1x1x4d", "2x2x1s", "4x1x1", "1x1x4", "2x1x2d", "1x2x2", "2x2x1")


def test_two_ranks_in_every_layout(two_ranks: list[dict[str, Any]]) -> None:
    check_layouts(two_ranks, TWO)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_in_every_layout(tmp_path: Path, precision: str) -> None:
    check_layouts(seen_by_ranks(tmp_path, FOUR, 4, precision), FOUR)


def test_a_poisoned_parameter_stops_all_ranks_before_any_update(two_ranks: list[dict[str, Any]]) -> None:
    for victim in (0, 1):
        results = [seen["poisoned"][victim] for seen in two_ranks]
        assert results[0]["message"] == results[1]["message"]
        head = "exit_1" if victim == 0 else "exit_3"
        assert results[0]["message"].startswith(f"the loss of {head} on rank {victim} in iteration 2 is not")
        for result in results:
            assert result["changed"] == []
            assert result["learning rate is the same"]
