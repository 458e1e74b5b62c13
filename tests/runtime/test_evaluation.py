"""Evaluation during training says of a model what evaluating its checkpoint says, in every layout."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_plan
from ranks import run_ranks
from small_data import build_small, run_for

from eeplan.console import PlainProgress
from eeplan.plan import Plan, load_plan, write_plan
from eeplan.runtime import backend, evaluation
from eeplan.runtime.batches import build_batches
from eeplan.runtime.decode.quality import Outcomes, exit_quality, threshold_quality
from eeplan.runtime.evaluate import run_model
from eeplan.runtime.model import build_model, whole_model_spec
from eeplan.usage import exit_shares, load_usage

DEPTHS = (1, 2, 4)
LAYOUTS = {
    "two_stages": {"parallel__pipeline_model_parallel_size": 2},
    "cut_vocabulary": {"parallel__tensor_model_parallel_size": 2},
    "two_replicas": {"parallel__data_parallel_size": 2},
}
ALONE = {"parallel__pipeline_model_parallel_size": 1}
ON_FOUR = {
    "four_stages": {"parallel__pipeline_model_parallel_size": 4},
    "stages_and_shares": {
        "parallel__pipeline_model_parallel_size": 2,
        "parallel__tensor_model_parallel_size": 2,
        "parallel__sequence_parallel": True,
    },
    "shares_and_replicas": {
        "parallel__tensor_model_parallel_size": 2,
        "parallel__data_parallel_size": 2,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of one model, and what two ranks in each layout left."""
    folder = tmp_path_factory.mktemp("evaluation")
    evaluate_in(folder, LAYOUTS, nproc=2)
    return folder


def evaluate_in(folder: Path, layouts: dict[str, dict[str, Any]], nproc: int) -> None:
    files = build_small(folder)
    for name, layout in {"alone": ALONE, **layouts}.items():
        settings: dict[str, Any] = {
            "model__num_layers": 4,
            # The same padding however it is cut, since losses count it.
            "model__make_vocab_size_divisible_by": 256,
            "model__hidden_size": 32,
            # Large enough that some tokens are sure of themselves at every exit.
            "model__init_method_std": 0.5,
            "training__seq_length": 16,
            "training__eval_iters": 2,
            "exits": {"layers": [{"layer": 1, "head": "mlp"}, {"layer": 2}]},
        }
        run = run_for(files, **(settings | ALONE | layout))
        write_plan(folder / f"{name}.yaml", make_plan(run))
    run_ranks("evaluation_worker", [folder, *layouts], nproc=nproc)


@pytest.fixture(scope="module")
def offline(folder: Path) -> Outcomes:
    """The same text judged by `eeplan evaluate`'s code on one process."""
    plan = load_plan(folder / "alone.yaml")
    with backend.single_process() as here:
        model = build_model(plan.run, whole_model_spec(plan), here)
        windows = np.concatenate(
            [
                np.concatenate([batch["tokens"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)
                for batch in build_batches(plan.run, split="valid")
            ]
        )
        return run_model(model, windows, "max_probability", PlainProgress(io.StringIO()))


def seen(folder: Path, layout: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / layout / "evaluation.json").read_text())
    return document


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_what_one_process_says(folder: Path, offline: Outcomes, layout: str) -> None:
    check_against(offline, seen(folder, layout))


@pytest.mark.long
def test_four_ranks_say_what_one_process_says(tmp_path: Path, folder: Path, offline: Outcomes) -> None:
    evaluate_in(tmp_path, ON_FOUR, nproc=4)
    for layout in ON_FOUR:
        found = seen(tmp_path, layout)
        check_against(offline, found)
        assert found["losses"] == pytest.approx(seen(folder, "two_stages")["losses"], rel=1e-5)


def check_against(offline: Outcomes, found: dict[str, Any]) -> None:
    assert found["num_tokens"] == offline.num_tokens == 2 * 16 * 16
    for index, name in enumerate(("exit_1", "exit_2", "final")):
        wanted = exit_quality(offline, index)
        for key, value in wanted.items():
            if key != "reliability":
                assert found["exits"][name][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)
        counts = [one["tokens"] for one in found["exits"][name]["reliability"]]
        assert counts == pytest.approx([one["tokens"] for one in wanted["reliability"]], abs=1), name
    for point in found["thresholds"]:
        wanted = threshold_quality(offline, point["threshold"], DEPTHS)
        assert point["exit_shares"] == pytest.approx(wanted["exit_shares"], abs=2 / offline.num_tokens)
    assert max(len(set(point["exit_shares"])) for point in found["thresholds"]) == 3, "every exit is taken"


def test_losses_do_not_depend_on_the_layout(folder: Path) -> None:
    two_stages, *others = (seen(folder, layout) for layout in LAYOUTS)
    for other in others:
        assert other["losses"] == pytest.approx(two_stages["losses"], rel=1e-5)
    assert len(set(two_stages["losses"].values())) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_plan_reads_the_usage(folder: Path, layout: str) -> None:
    usage, _ = load_usage(folder / layout / "usage.yaml")
    assert usage.measured is not None
    assert "iteration 3 of run 'small' on the validation part of text" in usage.measured.source
    for point in seen(folder, layout)["thresholds"]:
        shares = exit_shares(usage.content, point["threshold"], DEPTHS[:2], DEPTHS[2])
        assert not shares.is_assumption
        assert shares.all == pytest.approx(point["exit_shares"])


def test_tokens_of_different_exits_are_the_same_tokens(folder: Path, offline: Outcomes) -> None:
    """Control: shifted by one token against the final exit, an exit would agree less often."""
    shifted = np.roll(offline.predicted_EN[1], 1)
    agreement = float((shifted == offline.predicted_EN[-1]).mean())
    for layout in LAYOUTS:
        assert abs(seen(folder, layout)["exits"]["exit_2"]["agreement_with_final"] - agreement) > 0.05


def test_large_evaluations_ship_part_of_the_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eeplan.runtime.setup import set_up

    monkeypatch.setattr(evaluation, "MAX_TOKENS", 100)
    plan: Plan = load_plan(folder / "alone.yaml")
    rank = set_up(plan)
    try:
        found = evaluation.evaluators(rank)["valid"].run(1)
    finally:
        backend.stop()
    assert found.outcomes is not None
    assert found.outcomes.num_tokens == 3 * 2 * 16, "whole microbatches"
    assert found.losses == pytest.approx(seen(folder, "two_replicas")["losses"], rel=1e-5), "of all text"
