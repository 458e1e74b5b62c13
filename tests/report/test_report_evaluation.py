"""Figures of `eeplan evaluate`: what is drawn is the result's numbers, and nothing that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from eeplan.errors import FileError, SchemaError
from eeplan.report.figures.evaluation import figures, write_figures
from eeplan.runtime.decode.quality import THRESHOLDS, Outcomes, exit_quality, threshold_quality

NAMES, DEPTHS = ("exit_2", "exit_4", "final"), (2, 4, 6)


def made_up(names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """A result of made-up tokens; leaving earlier is faster, and less so than predicted."""
    rng = np.random.default_rng(1)
    probability = rng.random((len(names), 500))
    outcomes = Outcomes(
        cross_entropy_EN=-np.log(probability),
        predicted_EN=rng.integers(0, 4, probability.shape),
        probability_EN=probability,
        confidence_EN=probability,
        label_N=rng.integers(0, 4, 500),
    )
    depths = DEPTHS[-len(names) :]
    points = [
        threshold_quality(outcomes, threshold, depths)
        | {
            "predicted": {
                "full": {"tokens_per_s": 50.0, "speed_up": 1.0},
                "catch_up": {"tokens_per_s": 50.0 * (2 - threshold), "speed_up": 2 - threshold},
            },
            "measured": {"mode": "catch_up", "tokens_per_s": 40.0, "speed_up": 1.8 - 0.8 * threshold},
        }
        for threshold in THRESHOLDS
    ]
    return {
        "data": "file text.txt",
        "num_tokens": 500,
        "confidence": "margin",
        "exits": [{"name": name} | exit_quality(outcomes, index) for index, name in enumerate(names)],
        "thresholds": points,
        "plan_threshold": 0.8,
        "speed": {
            "prompts": 4,
            "prompt_tokens": 16,
            "new_tokens": 24,
            "device": "a machine",
            "threads": 2,
            "dtype": "float32",
        },
    }


def changed(result: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same with fields of every threshold replaced."""
    return result | {"thresholds": [point | fields for point in result["thresholds"]]}


def lines(figure: Figure) -> dict[str, Any]:
    (axes,) = figure.axes
    return {str(line.get_gid()): line for line in axes.lines if line.get_gid()}


def test_speed_ups_are_the_result() -> None:
    result = made_up()
    drawn = lines(figures(result)["speed"])
    assert set(drawn) == {"threshold", "predicted-catch_up", "measured"}
    points = result["thresholds"][::-1]
    for name, found in (
        ("measured", [point["measured"]["speed_up"] for point in points]),
        ("predicted-catch_up", [point["predicted"]["catch_up"]["speed_up"] for point in points]),
    ):
        assert list(drawn[name].get_xdata()) == [point["threshold"] for point in points]
        assert list(drawn[name].get_ydata()) == found
    assert drawn["measured"].get_linestyle() == "-"
    assert drawn["predicted-catch_up"].get_linestyle() == "--"
    other = lines(figures(changed(result, measured={"mode": "catch_up", "speed_up": 3.0}))["speed"])
    assert set(other["measured"].get_ydata()) == {3.0}
    caption = figures(result)["speed"].get_supxlabel()
    assert caption == "a machine, 2 threads, float32; median of 4 prompts of 16 tokens, 24 new"


def test_usage_and_calibration_are_the_result() -> None:
    result = made_up()
    drawn = figures(result)
    points = result["thresholds"][::-1]
    assert list(lines(drawn["usage"])["agreement"].get_ydata()) == [
        point["agreement_with_final"] for point in points
    ]
    for head in result["exits"]:
        line = lines(drawn["reliability"])[f"line-{head['name']}"]
        assert list(line.get_ydata()) == [one["accuracy"] for one in head["reliability"]]


def test_only_what_is_known_is_drawn() -> None:
    result = made_up()
    unmeasured = changed(result, measured=None) | {"speed": None}
    assert set(lines(figures(unmeasured)["speed"])) == {"threshold", "predicted-catch_up"}
    unpredicted = changed(result, predicted=None)
    assert set(lines(figures(unpredicted)["speed"])) == {"threshold", "measured"}
    assert set(figures(changed(unmeasured, predicted=None))) == {"reliability", "usage"}
    single = changed(made_up(("final",)), predicted=None, measured=None)
    assert set(figures(single)) == {"reliability"}


def test_files_are_written_whole(tmp_path: Path) -> None:
    written = write_figures(tmp_path / "new" / "figures", made_up())
    assert sorted(path.name for path in (tmp_path / "new" / "figures").iterdir()) == [
        "reliability.png",
        "speed.png",
        "usage.png",
    ]
    assert {path.read_bytes()[:8] for path in written} == {b"\x89PNG\r\n\x1a\n"}
    with pytest.raises(SchemaError, match="accuracy"):
        write_figures(tmp_path, changed(made_up(), accuracy=2.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"folder of figures .* is a file"):
        write_figures(tmp_path / "file", made_up())
