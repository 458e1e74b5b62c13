"""`eeplan calibrate`: the promise on a model's own outcomes, the certificate, and which text is judged."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom
from small_data import build_small, numbered_texts, write_jsonl
from tiny_checkpoint import SEQ_LENGTH, tiny_model

from eeplan.cli import main
from eeplan.console import PlainProgress
from eeplan.errors import CheckpointError, DataError, DecodeError, FileError
from eeplan.runtime import backend
from eeplan.runtime.checkpoint import load_model
from eeplan.runtime.checkpoint_files import verify
from eeplan.runtime.decode.calibration import Asked, asked_for, calibrate, cut, judge_windows, select
from eeplan.runtime.decode.certificate import CERTIFICATE, load_certificate
from eeplan.runtime.decode.risk_control import Judged, single_settings

DEPTHS = (2, 4, 6)
PROGRESS = PlainProgress(io.StringIO())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    with tiny_model(folder):
        write_jsonl(folder / "held_out.jsonl", numbered_texts(400, words=20))
    return folder


@pytest.fixture
def run_copy(run_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def everything(run_folder: Path) -> Iterator[Judged]:
    """What the model's exits say about 1,500 documents: the population to draw from."""
    asked = asked_for(max_tokens=1500 * SEQ_LENGTH)
    rng = np.random.default_rng(0)
    documents = [rng.integers(97, 123, rng.integers(20, 60)) for _ in range(1500)]
    with backend.single_process() as here:
        model, _ = load_model(run_folder, here)
        yield judge_windows(model, cut(documents, SEQ_LENGTH, asked, 256), asked, PROGRESS)


def drawn(judged: Judged, rng: np.random.Generator, units: int) -> Judged:
    """Units drawn from a population with replacement."""
    where = np.split(np.arange(len(judged.unit_N)), np.cumsum(np.bincount(judged.unit_N))[:-1])
    order = np.argsort(judged.unit_N, kind="stable")
    parts = [order[where[unit]] for unit in rng.integers(0, judged.num_units, units)]
    tokens = np.concatenate(parts)
    one = judged.outcomes
    outcomes = replace(
        one,
        cross_entropy_EN=one.cross_entropy_EN[:, tokens],
        predicted_EN=one.predicted_EN[:, tokens],
        probability_EN=one.probability_EN[:, tokens],
        confidence_EN=one.confidence_EN[:, tokens],
        label_N=one.label_N[tokens],
    )
    return Judged(outcomes, np.repeat(np.arange(units), [len(part) for part in parts]), judged.metric)


def exceeded(judged: Judged, asked: Asked, draws: int) -> tuple[int, int]:
    """In how many calibrations a selection's true risk is above the stated one; and how many save depth."""
    rng, broken, saving = np.random.default_rng(1), 0, 0
    for _ in range(draws):
        found = [one for one in select(drawn(judged, rng, 400), DEPTHS, asked) if one is not None]
        broken += max(float(judged.losses(one.thresholds).mean()) for one in found) > asked.risk
        saving += min(one.mean_depth for one in found) < 6.0
    return broken, saving


def test_a_models_risk_is_exceeded_no_more_often_than_allowed(everything: Judged) -> None:
    asked = asked_for(risk=0.05, confidence=0.9)
    broken, saving = exceeded(everything, asked, draws=25)
    assert broken <= binom.ppf(0.999, 25, 0.1)
    assert saving > 20, "a calibration that never lets anybody leave proves nothing"


@pytest.mark.long
def test_a_models_risk_over_200_calibrations(everything: Judged) -> None:
    asked = asked_for(risk=0.05, confidence=0.9)
    broken, saving = exceeded(everything, asked, draws=200)
    print(f"200 calibrations at confidence 0.9: risk exceeded in {broken}, depth saved in {saving}")
    assert broken <= 20
    assert saving > 180


def test_without_the_test_a_models_risk_is_exceeded(everything: Judged) -> None:
    """Negative control: the loosest threshold whose mean loss is low enough, on what is drawn."""
    rng, broken, risk = np.random.default_rng(1), 0, 0.05
    true_risks = [float(everything.losses(one).mean()) for one in single_settings(2)]
    for _ in range(80):
        sample = drawn(everything, rng, 60)
        good = [i for i, one in enumerate(single_settings(2)) if sample.losses(one).mean() <= risk]
        broken += true_risks[good[-1]] > risk
    assert broken > binom.ppf(0.999, 80, 0.1)


def test_a_certificate_is_stored_with_its_checkpoint(run_copy: Path) -> None:
    folder = run_copy / "checkpoints" / "iter_0000007"
    before = verify(folder)
    asked = asked_for(risk=0.1, max_tokens=400 * SEQ_LENGTH)
    certificate, path = calibrate(run_copy, run_copy / "held_out.jsonl", asked, PROGRESS)
    assert path == folder / CERTIFICATE
    assert verify(folder) == before, "the checkpoint stays valid"
    assert load_certificate(folder, before["manifest_sha256"]) == certificate
    assert certificate.units == 400
    assert certificate.exits == (2, 4)
    assert certificate.selection.passed
    assert certificate.selection.mean_depth < 6.0
    assert len(certificate.thresholds) == (1 if certificate.chosen == "single" else 2)
    assert "expected to be at most 0.1" in certificate.statement
    assert "drawn independently" in certificate.assumption
    again, _ = calibrate(run_copy, run_copy / "held_out.jsonl", asked, PROGRESS)
    assert again.model_copy(update={"created": certificate.created}) == certificate


def test_no_threshold_passes_on_too_little_text(run_copy: Path) -> None:
    write_jsonl(run_copy / "few.jsonl", numbered_texts(30))
    certificate, _ = calibrate(run_copy, run_copy / "few.jsonl", asked_for(), PROGRESS)
    assert certificate.thresholds == (1.0,)
    assert not certificate.selection.passed
    assert certificate.selection.exit_shares == (0.0, 0.0, 1.0)
    assert "nothing leaves early (threshold 1): 30 documents" in certificate.statement
    assert "at least 183 without any loss" in certificate.statement


def test_a_certificate_serves_only_its_own_checkpoint(run_copy: Path) -> None:
    folder = run_copy / "checkpoints" / "iter_0000007"
    digest = verify(folder)["manifest_sha256"]
    assert load_certificate(folder, digest) is None
    calibrate(run_copy, run_copy / "held_out.jsonl", asked_for(risk=0.2, max_tokens=9000), PROGRESS)
    with pytest.raises(CheckpointError, match="is of another checkpoint"):
        load_certificate(folder, "0" * 64)
    content = json.loads((folder / CERTIFICATE).read_text())
    (folder / CERTIFICATE).write_text(json.dumps(content | {"risk": 0.001}))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        load_certificate(folder, digest)
    for text in ("", "[]", "{}", "nonsense"):
        (folder / CERTIFICATE).write_text(text)
        with pytest.raises(CheckpointError, match="calibrate` again"):
            load_certificate(folder, digest)


def test_documents_give_as_many_windows_each() -> None:
    documents = [np.arange(n) for n in (5, 40, 100, 1000)]
    few = cut(documents, 16, asked_for(max_tokens=3 * 16), 999)
    assert few.units.tolist() == [0, 1, 2], "one window each; the shortest text is left out"
    many = cut(documents, 16, asked_for(max_tokens=12 * 16), 999)
    assert np.bincount(many.units).tolist() == [2, 4, 4]
    for row, length in zip(many.tokens, many.lengths, strict=True):
        assert np.all(np.diff(row[: length + 1]) == 1), "windows are pieces of the text"
        assert np.all(row[length + 1 :] == 999)
    alone = cut(documents, 16, asked_for(max_tokens=12 * 16, unit="sequence"), 999)
    assert alone.units.tolist() == list(range(12))
    with pytest.raises(DataError, match="more than 8 tokens"):
        cut([np.arange(8)], 16, asked_for(), 999)


def test_filled_up_positions_are_not_judged(run_folder: Path) -> None:
    """A short text beside long ones is judged as it is alone."""
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 256, length) for length in (12, 65, 30)]
    asked = asked_for()
    with backend.single_process() as here:
        model, _ = load_model(run_folder, here)
        together = judge_windows(model, cut(documents, SEQ_LENGTH, asked, 256), asked, PROGRESS)
        for unit, document in enumerate(documents):
            alone = judge_windows(model, cut([document], SEQ_LENGTH, asked, 0), asked, PROGRESS)
            mine = together.unit_N == unit
            assert together.outcomes.label_N[mine].tolist() == document[1:].tolist()
            found = together.outcomes.confidence_EN[:, mine]
            assert found == pytest.approx(alone.outcomes.confidence_EN, abs=1e-5)


def test_held_out_documents_of_the_training_data(tmp_path: Path) -> None:
    with tiny_model(tmp_path):
        build_small(tmp_path, numbered_texts(60))
        certificate, _ = calibrate(tmp_path, tmp_path / "text", asked_for(), PROGRESS)
    assert "held-out part" in certificate.data
    assert 0 < certificate.units < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 0.0}, "risk is 0.0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"metric": "taste"}, "metric is 'taste'; expected one of disagreement, accuracy_loss"),
        ({"unit": "token"}, "unit is 'token'; expected one of document, sequence"),
        ({"kind": "luck"}, "exit confidence is 'luck'"),
        ({"p_value": "z"}, "p-value is 'z'"),
        ({"max_tokens": 0}, "max tokens is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        asked_for(**options)


def test_the_command(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", str(run_copy), "--data", str(run_copy / "held_out.jsonl"), "--risk", "0.1"]
    arguments += ["--max-tokens", "9000"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["thresholds"]
    assert Path(result["certificate"]).is_file()
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "per_exit" in shown
    assert "with confidence 0.95 over the draw of the documents" in shown
    assert main(["calibrate", str(run_copy), "--data", "nowhere"]) == 2
    assert "nowhere is no text file" in capsys.readouterr().err
    write_jsonl(run_copy / "few.jsonl", numbered_texts(5))
    (run_copy / "checkpoints" / "iter_0000007" / CERTIFICATE).unlink()
    (run_copy / "checkpoints" / "iter_0000007" / CERTIFICATE).mkdir()
    with pytest.raises(FileError, match=CERTIFICATE):
        calibrate(run_copy, run_copy / "few.jsonl", asked_for(), PROGRESS)
