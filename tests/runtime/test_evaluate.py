"""Exits judged on held-out text: the numbers against plain loops, the usage file, and which text counts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from small_data import build_small, numbered_texts, wide_tokenizer
from torch.nn.functional import cross_entropy

from eeplan.cli import main
from eeplan.console import PlainProgress
from eeplan.decode_speed import Timing
from eeplan.decode_views import evaluation_cells
from eeplan.errors import DataError, DecodeError, FileError
from eeplan.plan import load_plan, write_plan
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.data import build_from_texts
from eeplan.runtime.dataset_files import DataFiles
from eeplan.runtime.decode import speed
from eeplan.runtime.decode.network import DecodeNetwork, Transformer
from eeplan.runtime.decode.policy import CONFIDENCE_KINDS, judge
from eeplan.runtime.decode.quality import (
    THRESHOLDS,
    Outcomes,
    calibration_error,
    exit_quality,
    joined,
    leaving_exit,
    measured_usage,
    reliability,
    threshold_quality,
)
from eeplan.runtime.evaluate import evaluate
from eeplan.runtime.evaluate_speed import spread_prompts
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.schema import write_yaml
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import Layout
from eeplan.sim.planner import make_plan as plan_run
from eeplan.usage import exit_shares, load_usage

SEQ_LENGTH = 16
DEPTHS = (2, 4, 6)


def drawn(seed: int, tokens: int = 300, exits: int = 3) -> Outcomes:
    rng = np.random.default_rng(seed)
    probability = rng.random((exits, tokens))
    return Outcomes(
        cross_entropy_EN=rng.random((exits, tokens)),
        predicted_EN=rng.integers(0, 4, (exits, tokens)),
        probability_EN=probability,
        # Hundredths, so that some confidences are exactly a threshold.
        confidence_EN=np.round(probability, 2),
        label_N=rng.integers(0, 4, tokens),
    )


def naive_exit(outcomes: Outcomes, token: int, threshold: float) -> int:
    last = len(outcomes.confidence_EN) - 1
    for index in range(last):
        if threshold < 1 and outcomes.confidence_EN[index][token] >= threshold:
            return index
    return last


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.35, 0.9, 1.0])
def test_quality_at_a_threshold_is_that_of_a_loop(threshold: float) -> None:
    outcomes = drawn(1)
    found = threshold_quality(outcomes, threshold, DEPTHS)
    where = [naive_exit(outcomes, token, threshold) for token in range(300)]
    emitted = [int(outcomes.predicted_EN[index][token]) for token, index in enumerate(where)]
    assert leaving_exit(outcomes, threshold).tolist() == where
    assert found["exit_shares"] == pytest.approx([where.count(index) / 300 for index in range(3)])
    assert found["mean_depth"] == pytest.approx(sum(DEPTHS[index] for index in where) / 300)
    right = sum(a == b for a, b in zip(emitted, outcomes.label_N, strict=True))
    assert found["accuracy"] == pytest.approx(right / 300)
    same = sum(a == b for a, b in zip(emitted, outcomes.predicted_EN[-1], strict=True))
    assert found["agreement_with_final"] == pytest.approx(same / 300)
    entropies = [outcomes.cross_entropy_EN[index][token] for token, index in enumerate(where)]
    assert found["cross_entropy"] == pytest.approx(sum(entropies) / 300)


def test_ends_of_the_threshold() -> None:
    outcomes = drawn(2)
    assert threshold_quality(outcomes, 1.0, DEPTHS)["exit_shares"] == [0, 0, 1]
    assert threshold_quality(outcomes, 1.0, DEPTHS)["agreement_with_final"] == 1.0
    assert threshold_quality(outcomes, 0.0, DEPTHS)["exit_shares"] == [1, 0, 0]
    only_final = drawn(2, exits=1)
    assert threshold_quality(only_final, 0.0, (6,))["exit_shares"] == [1]
    assert (THRESHOLDS[0], THRESHOLDS[-1], len(THRESHOLDS)) == (1.0, 0.0, 21)


def test_calibration() -> None:
    """Right as often as said is no error; always right at 0.75 is one of 0.25."""
    probability = np.repeat([0.25, 0.75], 400)
    right = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 != 0])
    assert calibration_error(reliability(probability, right)) == pytest.approx(0.0)
    assert calibration_error(reliability(probability[400:], np.ones(400, dtype=bool))) == pytest.approx(0.25)
    (low, high) = reliability(probability, right)
    assert (low["tokens"], high["tokens"]) == (400, 400)
    assert low["lower"] < 0.25 <= low["upper"]
    edges = reliability(np.array([0.0, 1.0, 1 / 15]), np.array([True, True, True]))
    assert [(one["lower"], one["tokens"]) for one in edges] == [(0, 2), (14 / 15, 1)]


def test_exit_on_its_own() -> None:
    outcomes = drawn(3)
    found = exit_quality(outcomes, 0)
    assert found["accuracy"] == pytest.approx((outcomes.predicted_EN[0] == outcomes.label_N).mean())
    assert exit_quality(outcomes, 2)["agreement_with_final"] == 1.0
    assert sum(one["tokens"] for one in found["reliability"]) == 300


def test_usage_counts_tokens() -> None:
    outcomes = joined([drawn(4), drawn(5, tokens=100)])
    usage = measured_usage(outcomes, DEPTHS[:2], 6, "a test")
    assert usage.num_tokens == 400
    for point in usage.curve:
        where = [naive_exit(outcomes, token, point.threshold) for token in range(400)]
        assert point.first_leave == pytest.approx([where.count(0) / 400, where.count(1) / 400])
        could = [
            (row >= point.threshold).mean() if point.threshold < 1 else 0.0 for row in outcomes.confidence_EN
        ]
        assert point.could_leave == pytest.approx(could[:2])


@dataclass(frozen=True)
class Trained:
    """A checkpoint with random but confident parameters, and the data it says it was trained on."""

    folder: Path
    model: EarlyExitGPT
    files: DataFiles


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("run")
    files = build_small(folder)
    run = make_run(
        model={
            "num_layers": 6,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 257,
            "init_method_std": 0.5,
        },
        training__seq_length=SEQ_LENGTH,
        exits={"layers": [{"layer": 2, "head": "block"}, {"layer": 4, "head": "mlp"}]},
        data={"data_path": str(files.prefix), "tokenizer": str(files.tokenizer), "split": "80,20,0"},
    )
    write_plan(folder / "plan.yaml", make_plan(run))
    plan = load_plan(folder / "plan.yaml")
    write_yaml(folder / "profile.yaml", with_decode_costs(make_profile(run)))
    with backend.single_process() as here:
        model = build_model(run, whole_model_spec(plan), here)
        checkpoint.save(folder / "checkpoints", 7, model, plan)
        yield Trained(folder, model, files)


def evaluated(trained: Trained, data: Path, **options: Any) -> dict[str, Any]:
    """Without timing, unless asked for."""
    options = {"speed_prompts": 0} | options
    return evaluate(trained.folder, data, progress=PlainProgress(io.StringIO()), **options)


@pytest.fixture(scope="module")
def timed(trained: Trained) -> dict[str, Any]:
    return evaluated(trained, trained.files.prefix, speed_prompts=1, max_tokens=40)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(numbered_texts(1, words=12, seed=3)[0])
    return path


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_numbers_are_those_of_decoding_token_by_token(trained: Trained, text: Path, kind: str) -> None:
    """Against the decoder's own network, fed the true tokens one at a time."""
    found = evaluated(trained, text, confidence=kind)
    stream = [*byte_tokenizer().encode(text.read_text()), byte_tokenizer().eod]
    said: list[list[tuple[float, float, int]]] = []
    for start in range(0, len(stream) - SEQ_LENGTH, SEQ_LENGTH):
        network = DecodeNetwork(trained.model, SEQ_LENGTH, 257)
        for at in range(SEQ_LENGTH):
            token, label = stream[start + at], stream[start + at + 1]
            with torch.no_grad():
                hidden, depth, row = network.embed([token]), 0, []
                for exit_depth in (2, 4, 6):
                    hidden = network.run_layers(hidden, at, depth, exit_depth)
                    depth = exit_depth
                    read = network.run_block(2, hidden, at) if depth == 2 else hidden
                    logits = network.exit_logits(depth, read)[0]
                    loss = float(cross_entropy(logits, torch.tensor(label)))
                    row.append((judge(logits, kind).confidence, loss, int(logits.argmax())))
            said.append(row)
    assert found["num_tokens"] == len(said)
    for index, head in enumerate(found["exits"]):
        assert head["cross_entropy"] == pytest.approx(np.mean([row[index][1] for row in said]), abs=1e-4)
        same = np.mean([row[index][2] == row[2][2] for row in said])
        assert head["agreement_with_final"] == pytest.approx(same)
    for point in found["thresholds"]:
        due = point["threshold"]
        where = [next((i for i in (0, 1) if due < 1 and row[i][0] >= due), 2) for row in said]
        assert point["exit_shares"] == pytest.approx([where.count(i) / len(said) for i in range(3)], abs=0.02)
    assert max(len(set(point["exit_shares"])) for point in found["thresholds"]) == 3


def test_usage_file_is_what_a_plan_reads(trained: Trained, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "usage.yaml"
    found = evaluated(trained, text, usage_out=path)
    assert found["usage"] == str(path)
    usage, digest = load_usage(path)
    assert usage.measured is not None
    assert "file text.txt" in usage.measured.source
    assert usage.measured.num_tokens == found["num_tokens"]
    for point in found["thresholds"]:
        shares = exit_shares(usage.content, point["threshold"], (2, 4), 6)
        assert not shares.is_assumption
        assert shares.all == pytest.approx(point["exit_shares"])
    plan = load_plan(trained.folder / "plan.yaml")
    profile = with_decode_costs(make_profile(plan.run))
    before = plan_run(plan.run, "0" * 64, profile, "1" * 64).decode
    after = plan_run(plan.run, "0" * 64, profile, "1" * 64, usage, digest).decode
    assert before is not None
    assert after is not None
    assert before.usage_is_assumption
    assert not after.usage_is_assumption
    assert after.exit_shares == pytest.approx(found["thresholds"][4]["exit_shares"][:2])
    assert {m.mode: m.tokens_per_s for m in after.modes}["catch_up"] == pytest.approx(
        found["thresholds"][4]["predicted"]["catch_up"]["tokens_per_s"]
    )


def test_predictions_come_from_a_profile(trained: Trained, text: Path, tmp_path: Path) -> None:
    beside = evaluated(trained, text)
    assert beside["profile"] == str(trained.folder / "profile.yaml")
    plan = load_plan(trained.folder / "plan.yaml")
    slow = with_decode_costs(make_profile(plan.run), layer_s=1.0)
    write_yaml(tmp_path / "slow.yaml", slow)
    given = evaluated(trained, text, profile=tmp_path / "slow.yaml")
    full = [result["thresholds"][0]["predicted"]["full"]["tokens_per_s"] for result in (beside, given)]
    assert full[0] > 100 * full[1]
    layout = Layout(tuple(s.last_layer - s.first_layer + 1 for s in plan.stages))
    nothing = exit_shares(plan.run.decode.prior, 1.0, (), 6)
    assert full[1] == pytest.approx(
        1e9 / decode_prediction(slow, layout, (), nothing, "full", 8).ns_per_token
    )
    write_yaml(tmp_path / "training_only.yaml", make_profile(plan.run))
    without = evaluated(trained, text, profile=tmp_path / "training_only.yaml")
    assert {point["predicted"] is None for point in without["thresholds"]} == {True}


def test_what_was_held_out_from_training_counts(trained: Trained, tmp_path: Path) -> None:
    own = evaluated(trained, trained.files.prefix)
    assert own["data"] == "the held-out part of dataset text"
    texts = numbered_texts(40)
    held = byte_tokenizer().encode_batch(texts[32:])
    tokens = sum(len(ids) + 1 for ids in held)
    assert own["num_tokens"] == (tokens - 1) // SEQ_LENGTH * SEQ_LENGTH
    # The same tokens under another name are the same training data.
    build_from_texts(texts, tmp_path / "copy", byte_tokenizer())
    assert evaluated(trained, tmp_path / "copy")["data"] == "the held-out part of dataset copy"
    build_from_texts(texts[32:], tmp_path / "other", byte_tokenizer())
    other = evaluated(trained, tmp_path / "other")
    assert other["data"] == "dataset other"
    assert other["exits"] == own["exits"]
    assert evaluated(trained, tmp_path / "other", max_tokens=40)["num_tokens"] == 32


def test_every_threshold_is_timed(timed: dict[str, Any], trained: Trained, text: Path) -> None:
    measured = [point["measured"] for point in timed["thresholds"]]
    assert len(measured) == 21
    assert {one["mode"] for one in measured} == {"catch_up"}
    assert min(min(one["tokens_per_s"], one["speed_up"]) for one in measured) > 0
    # 8 and 9 tokens fill a sequence of 16, the last one is never fed.
    setting = {key: timed["speed"][key] for key in ("prompts", "prompt_tokens", "new_tokens")}
    assert setting == {"prompts": 1, "prompt_tokens": 8, "new_tokens": 9}
    without = evaluated(trained, text)
    assert {point["measured"] is None for point in without["thresholds"]} == {True}
    assert without["speed"] is None


def test_the_real_speed_up_is_a_ratio_of_the_same_rounds(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slows both of a round cancels, but only within the round."""
    seconds = {1.0: [4.0, 40.0, 4.0], 0.5: [2.0, 20.0, 1.0]}

    def time_all(model: Any, contenders: Any, prompts: Any, setting: Any, **_: Any) -> dict[Any, Timing]:
        assert setting.confidence == "margin"
        assert len(prompts) == 3
        return {one: Timing(token_s=seconds[one.threshold]) for one in contenders}

    monkeypatch.setattr(speed, "time_all", time_all)
    setting = speed.Setting(257, 8, 8, "margin")
    progress = PlainProgress(io.StringIO())
    prompts = [[1, 2], [3, 4], [5, 6]]
    never, half = speed.threshold_speeds(
        trained.model, "kv_recompute", (1.0, 0.5), prompts, setting, progress
    )
    assert half == {"mode": "kv_recompute", "tokens_per_s": 0.5, "speed_up": 2.0}
    assert never["speed_up"] == 1.0
    unpaired = half["tokens_per_s"] * np.mean(seconds[1.0])
    assert unpaired != pytest.approx(half["speed_up"])


def test_thresholds_are_held_against_a_full_run_of_their_own_time(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that becomes slower from group to group; one run of ``full`` for all would show that."""
    slower = iter([1.0, 2.0, 4.0])

    def time_all(model: Any, contenders: Any, prompts: Any, setting: Any, **_: Any) -> dict[Any, Timing]:
        now = next(slower)
        return {one: Timing(token_s=[now * (6.0 if one.mode == "full" else 3.0)]) for one in contenders}

    monkeypatch.setattr(speed, "time_all", time_all)
    setting = speed.Setting(257, 8, 8, "margin")
    found = speed.threshold_speeds(
        trained.model, "catch_up", THRESHOLDS, [[1]], setting, PlainProgress(io.StringIO())
    )
    assert [one["speed_up"] for one in found] == [2.0] * 21
    assert found[0]["tokens_per_s"] == 4 * found[-1]["tokens_per_s"]


def test_leaving_early_is_faster_and_the_time_of_the_prompt_is_left_out(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves by layers run says what was timed, without noise."""
    clock = [0.0]
    run_layers = Transformer.run_layers

    def counted(self: Transformer, hidden: Any, parts: Any, start: int, stop: int) -> Any:
        clock[0] += stop - start
        return run_layers(self, hidden, parts, start, stop)

    monkeypatch.setattr(Transformer, "run_layers", counted)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    prompts = spread_prompts(np.arange(34).reshape(2, 17), 2)
    setting = speed.Setting(257, 9, 8, "max_probability")
    never, always = speed.threshold_speeds(
        trained.model, "catch_up", (1.0, 0.0), prompts, setting, PlainProgress(io.StringIO())
    )
    assert never["speed_up"] == 1.0
    assert never["tokens_per_s"] == pytest.approx(1 / 6)
    assert always["speed_up"] > 1.5


def test_prompts_are_spread_over_the_text() -> None:
    windows = np.arange(40)[:, None] * 100 + np.arange(65)[None]
    prompts = spread_prompts(windows, 4)
    assert [prompt[0] for prompt in prompts] == [0, 1000, 2000, 3000]
    assert prompts[1] == list(range(1000, 1016))
    assert [prompt[0] for prompt in spread_prompts(windows[:2], 4)] == [0, 0, 100, 100]
    assert spread_prompts(windows[:, :2], 4) == spread_prompts(windows, 0) == []


def test_tables(trained: Trained, text: Path) -> None:
    quality, thresholds = evaluation_cells(evaluated(trained, text))
    assert [row[0] for row in quality.rows] == ["exit_2", "exit_4", "final"]
    assert len(thresholds.rows) == 21
    for cells in (quality, thresholds):
        assert {len(row) for row in cells.rows} == {len(cells.columns)}


def test_what_was_measured_is_beside_its_prediction(timed: dict[str, Any]) -> None:
    _, cells = evaluation_cells(timed)
    at = cells.columns.index("catch_up")
    assert cells.columns[at + 1] == "measured"
    assert cells.columns.count("measured") == 1
    for row, point in zip(cells.rows, timed["thresholds"], strict=True):
        assert row[at] == f"{point['predicted']['catch_up']['speed_up']:.2f}"
        assert row[at + 1] == f"{point['measured']['speed_up']:.2f}"
    assert "measured: catch_up over full, median of 1 prompt" in cells.title
    bare = timed | {"thresholds": [point | {"predicted": None} for point in timed["thresholds"]]}
    _, cells = evaluation_cells(bare)
    assert cells.columns[-1] == "measured"
    assert "catch_up" not in cells.columns
    unmeasured = [point | {"measured": None} for point in timed["thresholds"]]
    _, cells = evaluation_cells(timed | {"thresholds": unmeasured, "speed": None})
    assert "measured" not in cells.columns
    assert {len(row) for row in cells.rows} == {len(cells.columns)}


def test_figures_on_the_command_line(
    trained: Trained, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that cannot be made is refused first of all, even before a checkpoint that is not there."""
    folder = tmp_path / "new" / "figures"
    options = ["--data", str(text), "--speed-prompts", "0", "--json", "--figures"]
    assert main(["evaluate", str(trained.folder), *options, str(folder)]) == 0
    names = ["reliability.png", "speed.png", "usage.png"]
    assert sorted(json.loads(capsys.readouterr().out)["figures"]) == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    absent = ["evaluate", str(tmp_path / "absent"), *options]
    assert main([*absent, str(text / "figures")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "folder of figures" in line
    assert main([*absent, str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "folder of figures" not in line
    assert "absent" in line
    assert not (tmp_path / "other").exists()


def test_user_errors(trained: Trained, text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    build_from_texts(numbered_texts(3), tmp_path / "wide", wide_tokenizer(2000))
    cases: list[tuple[type[Exception], str, Path, dict[str, Any]]] = [
        (DataError, "is no text file, and no dataset's prefix", tmp_path / "absent", {}),
        (DataError, "has 6 tokens to judge, less than one sequence of 16", tmp_path / "short.txt", {}),
        (DataError, "made by another tokenizer", tmp_path / "wide", {}),
        (DecodeError, "confidence is 'luck'", text, {"confidence": "luck"}),
        (DecodeError, "max tokens is 0", text, {"max_tokens": 0}),
        (DecodeError, "speed prompts is -1", text, {"speed_prompts": -1}),
        (FileError, "absent.yaml", text, {"profile": tmp_path / "absent.yaml"}),
    ]
    for error, message, data, options in cases:
        with pytest.raises(error, match=message) as caught:
            evaluated(trained, data, **options)
        assert "\n" not in str(caught.value)
