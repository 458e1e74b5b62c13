"""The demo's order of steps and what each leaves, with the expensive ones replaced by stand-ins."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_profile
from world import TEXTS

from eeplan import demo
from eeplan.console import PlainProgress
from eeplan.plan import Plan, load_plan, write_plan
from eeplan.profile import OpProfile
from eeplan.runtime.dataset_files import check_data
from eeplan.spec import RunSpec, load_run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def measure(run: RunSpec, *, progress: Any) -> OpProfile:
        made.append("measure")
        return make_profile(run)

    def run_ranks(plan_path: Path, plan: Plan, out: Path, progress: Any) -> None:
        made.append("train")
        assert not (out / "plan.yaml").exists(), "an old run is in the way"
        write_plan(out / "plan.yaml", plan)

    def generate_text(checkpoint: Path, prompt: str, options: Any) -> dict[str, Any]:
        made.append("generate")
        tokens = [{"text": "x", "id": 1, "exit": "final", "confidence": 0.5}]
        more = {"prompt": prompt, "text": "x", "threshold": options.policy.threshold, "tokens_per_s": 9.0}
        return {"tokens": tokens, "seconds": 1.0, **more}

    def write_report(run_dir: Path, out: Path) -> dict[str, Any]:
        made.append("report")
        assert (run_dir / "samples.json").is_file()
        assert (run_dir / "profile.yaml").is_file()
        return {"wall_s": 1.0}

    corpus = [(f"{i}", text) for i, text in enumerate(TEXTS * 4)]
    monkeypatch.setattr("eeplan.runtime.corpus.demo_corpus", lambda size_bytes: corpus)
    monkeypatch.setattr("eeplan.runtime.profiler.measure", measure)
    monkeypatch.setattr("eeplan.runtime.preflight.run_ranks", run_ranks)
    monkeypatch.setattr("eeplan.runtime.decode.generate.generate_text", generate_text)
    monkeypatch.setattr("eeplan.report.build.write_report", write_report)
    return made


def test_steps_and_files(calls: list[str], tmp_path: Path) -> None:
    stream = io.StringIO()
    out = tmp_path / "deep" / "demo"
    result = demo.run_demo(out, progress=PlainProgress(stream))
    assert calls == ["measure", "train", *["generate"] * len(demo.PROMPTS), "report"]
    assert result["wall_s"] == 1.0
    assert [name[:3] for name in result["steps"]] == [f"{n}/6" for n in range(1, 7)]
    run, _ = load_run(out / "run.yaml")
    check_data(run)
    assert load_plan(out / "plan.yaml").run == run
    samples = json.loads((out / "run" / "samples.json").read_text())
    assert [sample["prompt"] for sample in samples] == list(demo.PROMPTS)
    assert set(samples[0]) == {"prompt", "threshold", "tokens", "tokens_per_s"}
    assert "6/6 write the report: done in" in stream.getvalue()


def test_a_second_demo_replaces_the_first(calls: list[str], tmp_path: Path) -> None:
    keep = tmp_path / "mine.txt"
    for _ in range(2):
        demo.run_demo(tmp_path, progress=PlainProgress(io.StringIO()))
        keep.write_text("mine")
    assert calls.count("train") == 2
    assert keep.read_text() == "mine"


def test_the_run_file_is_what_the_issue_promises() -> None:
    run = demo.demo_run()
    assert run.parallel.world_size == 2
    assert run.exits.count == 2
    assert run.model.vocab_size == demo.VOCAB_SIZE
