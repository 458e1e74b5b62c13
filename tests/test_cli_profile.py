"""The command that measures: what it passes on. Measuring itself is tested under tests/runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_profile, make_run, write_run

from eeplan.cli import main
from eeplan.profile import load_profile


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Arguments of every measurement that a command starts; it gets a synthetic profile."""
    calls: list[dict[str, Any]] = []

    def measure(run: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return make_profile(run)

    monkeypatch.setattr("eeplan.runtime.preflight.require_runtime", lambda: None)
    monkeypatch.setattr("eeplan.runtime.profiler.measure", measure)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run.yaml", make_run())
    return calls


def test_several_microbatch_sizes_go_into_one_profile(asked: list[dict[str, Any]]) -> None:
    assert main(["profile", "run.yaml", "-o", "profile.yaml", "--micro-batch-sizes", "1, 2,8"]) == 0
    assert asked[0]["micro_batch_sizes"] == (1, 2, 8)
    assert load_profile(Path("profile.yaml"))[0].ops
    assert main(["profile", "run.yaml", "-o", "profile.yaml"]) == 0
    assert asked[1]["micro_batch_sizes"] == ()


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,-2", "1.5", "two"])
def test_other_sizes_are_refused(
    text: str, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "run.yaml", "-o", "profile.yaml", "--micro-batch-sizes", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"eeplan: error: --micro-batch-sizes {text}: expected positive numbers")
    assert error.count("\n") == 1
    assert not asked
