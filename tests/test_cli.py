"""The command line's surface, its two kinds of output, and what it does when things go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from world import tree

from eeplan import __version__, cli
from eeplan.cli import main
from eeplan.errors import EeplanError

SURFACE = {
    "profile": {"run", "--output", "-o", "--micro-batch-sizes", "--json"},
    "plan": {"run", "--profile", "--output", "-o", "--usage", "--json"},
    "pareto": {"run", "--profile", "--output", "-o", "--usage", "--pick", "--plan", "--json"},
    "simulate": {"plan", "--trace", "--ascii", "--width", "--json"},
    "rehearse": {"plan", "--iterations", "--time-scale", "--trace", "--json"},
    "train": {"plan", "--out", "--nproc", "--restart", "--json"},
    "report": {"run_dir", "--output", "-o", "--compare-plan", "--json"},
    "generate": {
        *("checkpoint", "--prompt", "--threshold", "--max-new-tokens", "--temperature", "--seed", "--json"),
        *("--mode", "--recompute-limit", "--exits", "--confidence", "--first-early-token"),
        *("--top-k", "--top-p", "--repetition-penalty", "--stop", "--compare-full"),
        *("--candidates", "--candidate-source", "--frequent-from", "--measure-candidates"),
        *("--dtype", "--pipeline-size", "--tensor-size"),
    },
    "calibrate": {
        *("checkpoint", "--data", "--risk", "--confidence", "--metric", "--unit", "--exit-confidence"),
        *("--p-value", "--max-tokens", "--seed", "--json"),
    },
    "serve": {
        *("checkpoint", "--host", "--port", "--threshold", "--mode", "--model-name"),
        *("--candidates", "--candidate-source", "--frequent-from", "--measure-candidates"),
        *("--dtype", "--pipeline-size", "--tensor-size"),
        *("--api-key-file", "--max-running", "--max-waiting", "--max-tokens", "--max-choices", "--grace"),
    },
    "chat": {
        *("checkpoint", "--threshold", "--mode", "--max-new-tokens", "--temperature", "--top-p", "--seed"),
        *("--dtype", "--pipeline-size", "--tensor-size"),
    },
    "evaluate": {
        *("checkpoint", "--data", "--usage-out", "--profile", "--confidence", "--max-tokens"),
        *("--speed-prompts", "--figures", "--json"),
    },
    "data build": {"inputs", "--output", "-o", "--tokenizer", "--vocab-size", "--json"},
    "doctor": {"--json"},
    "demo": {"--out", "--json"},
    "bench sim": {"--json"},
    "bench train": {"--stages", "--rounds", "--json"},
    "bench decode": {
        *("checkpoint", "--data", "--profile", "--threshold", "--batch", "--rounds", "--max-new-tokens"),
        *("--pipeline-size", "--figures", "--json"),
    },
    "validate paper": {"--data", "--json"},
    "validate sailor": {"--data", "--link-bandwidth", "--link-latency", "--base-bytes", "--json"},
    "import-ops": {
        *("table", "--output", "-o", "--run", "--name", "--device-name", "--device-memory"),
        *("--link-bandwidth", "--link-latency", "--node-link-bandwidth", "--node-link-latency"),
        *("--base-bytes", "--date", "--json"),
    },
    "flags emit": {"plan", "--for", "--output", "-o", "--json"},
    "flags read": {"script", "--output", "-o", "--define", "--vocab-size", "--json"},
    "sweep": {"run", "--profile", "--output", "-o", "--set", "--figures", "--usage", "--json"},
}

TALKING = ("serve", "chat")
"""Commands that go on, and have no result."""


def surface(command: Any, prefix: str = "") -> dict[str, set[str]]:
    if hasattr(command, "commands"):
        parts = (surface(child, f"{prefix}{name} ") for name, child in command.commands.items())
        return {name: options for part in parts for name, options in part.items()}
    return {prefix.strip(): {option for param in command.params for option in param.opts}}


def test_the_surface_is_what_users_know() -> None:
    """A change here changes what scripts can call: change the README with it."""
    assert surface(typer.main.get_command(cli.app)) == SURFACE


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SURFACE:
        assert main([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert f"Usage: eeplan {name}" in out
        assert ("--json" in out) == (name not in TALKING)


def test_version_and_bare_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"eeplan {__version__}\n"
    assert main([]) == 0
    assert "Usage: eeplan" in capsys.readouterr().out


def test_plan_for_people_and_for_programs(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "run.yaml", "--profile", "profile.yaml", "-o", "out.yaml"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.err == ""
    for part in (
        "plan 'small': 8 layers on 2 stages",
        "exit_",
        "critical path",
        "exits.placement: ",
        "why: ",
    ):
        assert part in first.out
    assert "\x1b" not in first.out, "no colours into a pipe"
    assert main(command) == 0
    assert capsys.readouterr().out == first.out, "stable"
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plan"] == "out.yaml"
    assert len(result["content_sha256"]) == 64
    assert {stage["first_layer"] for stage in result["stages"]} == {1, 5}


def test_simulate_agrees_with_the_plan_and_writes_a_trace(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "plan.yaml", "--trace", "t/trace.json", "--ascii", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pipeline_s"] == pytest.approx(result["predicted_pipeline_s"], rel=1e-6)
    assert result["ascii"].startswith("stage 0")
    for stage in result["stages"]:
        assert {"busy_s", "idle", "time_headroom", "critical", "peak_bytes", "spare_bytes"} == set(stage)
        assert stage["busy_s"] + sum(stage["idle"].values()) == pytest.approx(result["pipeline_s"])
    events = json.loads(Path("t/trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "C"}
    assert any(event.get("cat") == "critical path" for event in events)
    assert main(["simulate", "plan.yaml", "--ascii"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stage 0")
    assert "one simulated iteration" in out


def test_data_build(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "build", "some.txt", "some.jsonl", "-o", "new/text", "--tokenizer", "byte", "--json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["documents"] == 2
    assert result["tokenizer"] == "new/text.tokenizer.json"
    assert Path(result["tokenizer"]).is_file()
    assert "build data: done in" in captured.err


def test_train_starts_the_ranks_that_the_plan_needs(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake_launch(module: str, args: list[str], *, nproc: int, log: Path, on_line: Any, **_: Any) -> None:
        calls.append((module, args, nproc, log))
        on_line(" iteration        1/       4 | lm loss: 5.0")
        Path("out").mkdir()
        Path("out/measured.json").write_text('{"iteration_time_s": 0.25}')

    monkeypatch.setattr("eeplan.runtime.preflight.launch", fake_launch)
    assert main(["train", "plan.yaml", "--out", "out", "--json"]) == 0
    captured = capsys.readouterr()
    assert calls == [("eeplan.runtime.train", ["plan.yaml", "--out", "out"], 2, Path("out/train.log"))]
    assert json.loads(captured.out) == {"out": "out", "measured": {"iteration_time_s": 0.25}}
    assert " iteration        1/       4 | lm loss: 5.0\n" in captured.err


def test_training_may_go_on_in_the_folder_of_its_own_plan(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eeplan.plan import load_plan, write_plan

    write_plan(Path("runs/deep/out/plan.yaml"), load_plan(Path("plan.yaml")))
    started = []
    monkeypatch.setattr("eeplan.runtime.preflight.launch", lambda *args, **kwargs: started.append(args))
    monkeypatch.setattr(cli, "_read_json", lambda path: {})
    assert main(["train", "plan.yaml", "--out", "runs/deep/out"]) == 0
    assert started


def test_what_libraries_print_stays_off_stdout(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(*args: Any, **kwargs: Any) -> dict[str, Any]:
        print("a library is talking")
        numbers = {"tokens_per_s": 9.0, "mean_depth": 4.0, "mode": "catch_up", "drafts": None}
        return {"prompt": "a", "text": "b", "exits": {"exit_4": 1, "final": 0}, **numbers}

    monkeypatch.setattr("eeplan.runtime.serve.continuing.generate", noisy)
    command = ["generate", "run", "--prompt", "a", "--threshold", "0.5"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == "b"
    assert "a library is talking" in captured.err
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("ab\n\ntokens by exit: exit_4 1\nmode catch_up: 9.0")


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"evaluator": "engine", "p": 4, "m": 64, "configs_per_s": 500.0}
    monkeypatch.setattr("eeplan.bench.bench_sim", lambda: {"cases": [case]})
    assert main(["bench", "sim", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cases": [case]}
    assert main(["bench", "sim"]) == 0
    assert "engine     4  64  500            2.00 ms" in capsys.readouterr().out


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr("eeplan.spec.load_run", fail)
    return main(["plan", "run.yaml", "--profile", "profile.yaml", "-o", "out.yaml"])


def test_ctrl_c(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(world)
    assert failing_with(KeyboardInterrupt(), monkeypatch) == 130
    assert tree(world) == before


def test_a_bug_of_our_own_keeps_its_traceback(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="ours"):
        failing_with(AssertionError("ours"), monkeypatch)


def test_errors_of_several_lines_become_one(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing_with(EeplanError("first\n  second"), monkeypatch) == 2
    assert capsys.readouterr().err == "eeplan: error: first second\n"


def test_debug_shows_the_traceback(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "absent.yaml"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["--debug", "simulate", "absent.yaml"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_exit_code_of_a_bug_as_a_process(tmp_path: Path) -> None:
    code = "import sys, eeplan.cli as c; c.typer.main.get_command = None; sys.exit(c.main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stdout == ""
