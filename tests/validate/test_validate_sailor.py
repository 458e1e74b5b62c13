"""Measured runs of others against predictions from their op times, on their file and on synthetic ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles.longest_path import one_f_one_b_ns

from eeplan.errors import EeplanError
from eeplan.profile import Transfer
from eeplan.validate.sailor import validate_sailor

LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 6, 256, 4, 128, 1024
FREE = Transfer(latency_s=0.0, bandwidth_bytes_per_s=1e18)


def layer_memory(tp: int) -> dict[str, list[int]]:
    matrix, layer = 4 * HIDDEN * VOCAB // tp, 4 * 12 * HIDDEN**2 // tp
    return {
        "params_bytes": [matrix, *[layer] * LAYERS, matrix],
        "act_mem_bytes": [4 * SEQ * HIDDEN, *[40 * SEQ * HIDDEN] * LAYERS, 8 * SEQ * VOCAB // tp],
        "act_output_bytes": [1] * (LAYERS + 2),
    }


def document() -> dict[str, Any]:
    """A file of the same form, whose runs a naive simulator has "measured"."""
    ops = {
        f"mb{mb}_tp{tp}": [
            [0.001 * mb, 0.0, 0.0],
            *[[0.004 * mb / tp, 0.009 * mb / tp, 0.0] for _ in range(LAYERS)],
            [0.003 * mb, 0.005 * mb, 0.0],
        ]
        for mb in (1, 2)
        for tp in (1, 2)
    }
    runs = []
    for name, split, tp, dp, mb, batch in (
        ("a", [8], 1, 1, 1, 8),
        ("b", [4, 4], 1, 1, 2, 16),
        ("c", [4, 4], 1, 2, 2, 64),
        ("d", [3, 2, 3], 2, 1, 1, 12),
        ("e", [3, 2, 3], 2, 4, 1, 64),
        ("f", [2, 2, 2, 2], 1, 1, 1, 2),
    ):
        rows, at, forward, backward = ops[f"mb{mb}_tp{tp}"], 0, [], []
        for count in split:
            forward.append(round(1e9 * sum(row[0] for row in rows[at : at + count])))
            backward.append(round(1e9 * sum(row[1] for row in rows[at : at + count])))
            at += count
        seconds = one_f_one_b_ns(forward, backward, batch // mb // dp) / 1e9
        runs.append(
            {
                "name": name,
                "pipeline_parallel": len(split),
                "layers_per_stage": split,
                "tensor_parallel": tp,
                "data_parallel": dp,
                "micro_batch_size": mb,
                "global_batch_size": batch,
                "measured_iteration_time_s": seconds,
                "measured_peak_memory_bytes": 5_000_000_000,
            }
        )
    return {
        "note": "made up",
        "model": "small",
        "gpu": "any",
        "config": {
            "hidden_size": HIDDEN,
            "sequence_length": SEQ,
            "num_layers": LAYERS,
            "vocab_size": VOCAB,
            "heads": HEADS,
            "optimizer": "Adam",
        },
        "op_times_s": ops,
        "layer_memory_per_sequence_bytes": {f"tp{tp}": layer_memory(tp) for tp in (1, 2)},
        "runs": runs,
    }


def write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda d: None) -> Path:
    made = document()
    change(made)
    path = folder / "runs.json"
    path.write_text(json.dumps(made))
    return path


def test_runs_of_a_naive_simulator_are_predicted_exactly(tmp_path: Path) -> None:
    result = validate_sailor(write(tmp_path), link=FREE)
    assert result["raw"]["time"]["n"] == 6
    assert result["op_times_only"]["time"]["max_abs"] < 1e-7
    # Blocking messages of no length cost nothing either.
    assert result["raw"]["time"]["max_abs"] < 1e-3
    assert [run["name"] for run in result["runs"]] == list("abcdef")
    assert result["calibrated"]["time"]["n"] == 4
    assert result["calibrated"]["time"]["max_abs"] < 1e-7
    assert result["without_siblings"] == []


def test_layers_need_not_be_alike(tmp_path: Path) -> None:
    """The naive simulator sums the entries of each stage, and so does the prediction."""

    def uneven(d: dict[str, Any]) -> None:
        for rows in d["op_times_s"].values():
            for index, row in enumerate(rows):
                row[0] *= 1 + index % 3
        for run in d["runs"]:
            size = f"mb{run['micro_batch_size']}_tp{run['tensor_parallel']}"
            at, times = 0, ([], [])
            for count in run["layers_per_stage"]:
                for part in (0, 1):
                    times[part].append(
                        round(1e9 * sum(r[part] for r in d["op_times_s"][size][at : at + count]))
                    )
                at += count
            microbatches = run["global_batch_size"] // run["micro_batch_size"] // run["data_parallel"]
            run["measured_iteration_time_s"] = one_f_one_b_ns(*times, microbatches) / 1e9

    assert validate_sailor(write(tmp_path, uneven))["op_times_only"]["time"]["max_abs"] < 1e-7


def test_errors_are_signed_and_raw_predictions_never_see_measured_runs(tmp_path: Path) -> None:
    def slower(d: dict[str, Any]) -> None:
        for run in d["runs"]:
            run["measured_iteration_time_s"] *= 1.25
            run["measured_peak_memory_bytes"] *= 2

    first = validate_sailor(write(tmp_path), link=FREE)
    second = validate_sailor(write(tmp_path, slower), link=FREE)
    for mine, theirs in zip(first["runs"], second["runs"], strict=True):
        assert theirs["predicted_s"] == mine["predicted_s"]
        assert theirs["predicted_bytes"] == mine["predicted_bytes"]
        assert theirs["time_error"] == pytest.approx((1 + mine["time_error"]) / 1.25 - 1)
        assert theirs["memory_error"] == pytest.approx((1 + mine["memory_error"]) / 2 - 1)
    # A factor common to all runs is what calibration takes out.
    assert second["calibrated"]["time"]["max_abs"] < 1e-7
    assert second["op_times_only"]["time"]["mean"] == pytest.approx(-0.2)


def test_a_run_is_calibrated_by_its_siblings_only(tmp_path: Path) -> None:
    def one_slower(d: dict[str, Any]) -> None:
        d["runs"][1]["measured_iteration_time_s"] *= 1.1

    runs = {run["name"]: run for run in validate_sailor(write(tmp_path, one_slower), link=FREE)["runs"]}
    assert runs["b"]["calibrated_time_error"] == pytest.approx(1 / 1.1 - 1)
    assert runs["c"]["calibrated_time_error"] == pytest.approx(0.1)
    assert runs["d"]["calibrated_time_error"] == pytest.approx(0.0, abs=1e-7)
    assert runs["a"]["calibrated_time_error"] is None, "one stage"
    assert runs["f"]["calibrated_time_error"] is None, "too few microbatches"


def test_memory_is_state_activations_temporaries_and_base(tmp_path: Path) -> None:
    """Run a, one stage: 16 bytes per parameter, one microbatch, two fp32 tensors of logits, the base."""
    run = validate_sailor(write(tmp_path), base_bytes=1000)["runs"][0]
    memory = layer_memory(1)
    state = 4 * sum(memory["params_bytes"])
    kept = sum(memory["act_mem_bytes"])
    logits = 8 * SEQ * VOCAB
    assert run["predicted_bytes"] == state + kept + logits + 1000


def test_unfused_attention_needs_room_for_scores(tmp_path: Path) -> None:
    """One matrix is a s^2 fp32 values; a layer that keeps one also has a buffer for it."""
    scores = 4 * HEADS * SEQ**2

    def unfused(d: dict[str, Any]) -> None:
        kept = d["layer_memory_per_sequence_bytes"]["tp1"]["act_mem_bytes"]
        kept[1 : LAYERS + 1] = [44 * SEQ * HIDDEN + scores] * LAYERS

    first, second = (validate_sailor(write(tmp_path, c))["runs"][0] for c in (unfused, lambda d: None))
    kept = LAYERS * (4 * SEQ * HIDDEN + scores)
    assert first["predicted_bytes"] - second["predicted_bytes"] == kept + scores


def test_links_cost_time(tmp_path: Path) -> None:
    slow = Transfer(latency_s=0.0, bandwidth_bytes_per_s=1e7)
    free, costly = (validate_sailor(write(tmp_path), link=link)["runs"] for link in (FREE, slow))
    for mine, theirs in zip(free, costly, strict=True):
        assert (theirs["predicted_s"] > mine["predicted_s"]) == (mine["name"] != "a")
        assert theirs["compute_only_s"] == mine["compute_only_s"]
    # The gradient of the matrix that run b shares between its stages is one of the things that move.
    assert costly[1]["predicted_s"] - free[1]["predicted_s"] > 4 * HIDDEN * VOCAB / 1e7


def test_files_without_memory_still_work(tmp_path: Path) -> None:
    result = validate_sailor(write(tmp_path, lambda d: d.pop("layer_memory_per_sequence_bytes")))
    assert result["raw"]["memory"]["n"] == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("config"), "missing key 'config'"),
        (lambda d: d.update(runs=[]), "runs"),
        (
            lambda d: d["runs"][0].update(layers_per_stage=[7]),
            "expected 1 numbers that sum to the op table's 8",
        ),
        (lambda d: d["runs"][1].update(layers_per_stage=[1, 7]), "a stage without a transformer layer"),
        (lambda d: d["runs"][0].update(tensor_parallel=4), "has no tensor_model_parallel_size 4"),
        (lambda d: d["runs"][0].update(global_batch_size=7, micro_batch_size=2), "is not divisible by"),
        (lambda d: d["op_times_s"].update(mb1_tp1=[[1, 1, 1]] * 3), "lists of 3, 8 entries"),
        (lambda d: d["op_times_s"].update(other=[]), "expected a key such as 'mb1_tp1'"),
        (lambda d: d["op_times_s"]["mb1_tp1"][0].__setitem__(0, "fast"), "op_times_s"),
        (lambda d: d["op_times_s"]["mb1_tp1"][0].__setitem__(0, -1.0), "op_times_s"),
        (
            lambda d: d["layer_memory_per_sequence_bytes"]["tp1"]["params_bytes"].pop(),
            "has 7 params_bytes and 8 act_mem_bytes",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(EeplanError) as caught:
        validate_sailor(write(tmp_path, change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_published_runs_are_predicted_better_than_by_their_own_planner(validation_data: Path) -> None:
    """Sailor's own figures on these runs: 8.9 % mean for time, 5.9 % for memory."""
    result = validate_sailor(validation_data / "sailor_opt350_gh200.json")
    assert result["raw"]["time"]["n"] == len(result["runs"]) == 15
    assert result["raw"]["time"]["mean_abs"] < 0.089
    assert result["raw"]["memory"]["mean_abs"] < 0.059
    assert result["calibrated"]["time"]["max_abs"] <= 0.015
    assert result["calibrated"]["time"]["mean_abs"] <= 0.0113, (
        "what a one-point calibration was known to reach"
    )
    assert result["without_siblings"] == ["N4_D1", "N4_D2"]
    assert any(run["time_error"] > 0 for run in result["runs"])
    assert any(run["time_error"] < 0 for run in result["runs"])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_permuted_profile_is_seen(validation_data: Path, seed: int) -> None:
    """Negative control: times of another size instead of the right ones."""
    path = validation_data / "sailor_opt350_gh200.json"
    right, wrong = validate_sailor(path), validate_sailor(path, permutation_seed=seed)
    assert wrong["raw"]["time"]["mean_abs"] > 3 * right["raw"]["time"]["mean_abs"]
