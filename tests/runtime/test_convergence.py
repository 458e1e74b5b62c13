"""Training with planned exits converges as without (EE-LLM 5.1); the runs themselves are a campaign."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from campaigns.convergence import (
    Curve,
    convergence_run,
    curves_of,
    failures,
    judge,
    read_curves,
    run_campaign,
    write_csv,
    write_verdict,
)
from campaigns.places import REPORTS, work_folder
from campaigns.text import PACKAGES, missing_packages


def _curve(num_exits: int, seed: int, head: str, last: float, rate: float = 0.01) -> Curve:
    training = tuple((25 * (i + 1), last + rate * (39 - i)) for i in range(40))
    return Curve(num_exits, seed, head, training, last)


def _curves(final: float = 3.0, early: float = 3.2, early_rate: float = 0.01) -> list[Curve]:
    return [
        curve
        for seed in (1, 2, 3)
        for curve in (
            _curve(0, seed, "final", 3.0),
            _curve(2, seed, "exit_2", early, early_rate),
            _curve(2, seed, "final", final),
        )
    ]


def test_runs_with_and_without_exits_differ_in_nothing_else() -> None:
    with_, without = convergence_run(2, 1), convergence_run(0, 1)
    assert with_.exits.count == 2
    assert without.model_copy(update={"exits": with_.exits, "name": with_.name}) == with_


def test_the_papers_picture_passes() -> None:
    verdict = judge(_curves())
    assert failures(verdict) == []
    assert (verdict["ratio"], verdict["heads"]) == (1.0, {"exit_2": pytest.approx(3.2), "final": 3.0})
    assert verdict["late_slopes"]["final"] == pytest.approx(-0.01 * 16)


@pytest.mark.parametrize(
    ("curves", "what"),
    [
        (_curves(final=3.04), "1.3% above"),
        (_curves(early=2.9), "not somewhat above"),
        (_curves(early=4.0), "not somewhat above"),
        (_curves(early_rate=0.002), "another rate"),
    ],
)
def test_other_pictures_fail(curves: list[Curve], what: str) -> None:
    """Negative controls: a worse final exit, better or hopeless early exits, early exits that stand still."""
    assert any(what in failure for failure in failures(judge(curves)))


def test_curves_come_from_a_runs_metrics() -> None:
    lines = [
        json.dumps({"kind": "train", "iteration": i, "losses": {"final": float(i)}}) for i in range(1, 51)
    ]
    lines.append(json.dumps({"kind": "validation", "iteration": 50, "losses": {"final": 7.0}}))
    (curve,) = curves_of(0, 1, lines)
    assert (curve.training, curve.validation) == (((25, 13.0), (50, 38.0)), 7.0)
    with pytest.raises(ValueError, match="has not ended"):
        list(curves_of(0, 1, [*lines[:-1], lines[-1].replace("50", "0")]))


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_exits_do_not_cost_the_final_exit_its_quality() -> None:
    """Goes on where it was stopped (``campaigns.places``); leaves its evidence under reports/training."""
    texts, folder = work_folder("text"), work_folder("convergence")
    if missing_packages(texts) and shutil.which("apt-get"):
        names = [name.removesuffix("_all.deb").replace("%3a", ":").replace("_", "=") for name in PACKAGES]
        subprocess.run(["apt-get", "download", *names], cwd=texts, check=False)
    if missing_packages(texts):
        pytest.skip(f"put {', '.join(missing_packages(texts))} into {texts}; see campaigns/text.py")
    run_campaign(texts, folder)
    curves = read_curves(folder)
    write_csv(REPORTS / "convergence" / "curves.csv", curves)
    assert failures(write_verdict(REPORTS / "convergence", folder, curves)) == []
