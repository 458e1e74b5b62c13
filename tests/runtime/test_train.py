"""Training on real ranks, from a plan to a run folder and a report."""

import itertools
import json
import math
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan
from small_data import build_small, run_for

from eeplan.console import open_progress
from eeplan.errors import LaunchError
from eeplan.plan import load_plan, write_plan
from eeplan.report.build import write_report
from eeplan.report.compare import learnt
from eeplan.report.rundir import read_run
from eeplan.runtime import loop
from eeplan.runtime.preflight import check_training, run_ranks
from eeplan.timeline import Timeline

ITERATIONS = 8
EXITS = [{"layer": 2}, {"layer": 6, "boundary": "before", "head": "mlp"}]


def train(folder: Path, **overrides: Any) -> Path:
    """Train a small plan below ``folder``, here if it is one of a single process; the run folder."""
    files = build_small(folder)
    settings: dict[str, Any] = {
        "model__hidden_size": 32,
        "training__train_iters": ITERATIONS,
        "training__lr": 0.01,
        "training__log_interval": 4,
        "exits": {"layers": EXITS},
    }
    run = run_for(files, **(settings | overrides))
    write_plan(folder / "plan.yaml", make_plan(run))
    plan = check_training(folder / "plan.yaml", folder / "run")
    if run.parallel.world_size == 1:
        loop.train(plan, folder / "run")
        return folder / "run"
    with open_progress() as progress:
        run_ranks(folder / "plan.yaml", plan, folder / "run", progress)
    return folder / "run"


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("two"))


def test_losses_of_every_stage_reach_rank_0_and_fall(two_stages: Path) -> None:
    logged = records(two_stages, "train")
    assert [record["iteration"] for record in logged] == list(range(1, ITERATIONS + 1))
    first, last = logged[0]["losses"], logged[-1]["losses"]
    assert set(first) == {"exit_2", "exit_5", "final"}
    uniform = math.log(384)  # 257 byte tokens, padded
    for name, loss in first.items():
        assert loss == pytest.approx(uniform, rel=0.05), name
        assert last[name] < loss - 0.5, name
    before, after = records(two_stages, "validation")
    assert (before["iteration"], after["iteration"]) == (0, ITERATIONS)
    assert all(after["losses"][name] < before["losses"][name] for name in first)


def test_the_log_is_in_megatrons_style(two_stages: Path) -> None:
    log = (two_stages / "train.log").read_text()
    number = r"\d\.\d{6}E[+-]\d\d"
    pattern = (
        rf"iteration +8/ +8 \| consumed samples: +128 \| elapsed time per iteration \(ms\): [\d.]+ \| "
        rf"learning rate: {number} \| global batch size: +16 \| lm loss: {number} \| "
        rf"exit 2 loss: {number} \| exit 5 loss: {number} \| grad norm: [\d.]+ \|"
    )
    assert re.search(pattern, log), log


def test_the_split_does_not_change_training(two_stages: Path, tmp_path: Path) -> None:
    one_stage = train(tmp_path, parallel__pipeline_model_parallel_size=1)
    for ours, theirs in zip(records(two_stages, "train"), records(one_stage, "train"), strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), ours["iteration"]
        assert ours["lr"] == theirs["lr"]


def test_measured_timelines_are_of_one_clock_and_complete(two_stages: Path) -> None:
    document = json.loads((two_stages / "timelines.json").read_text())
    microbatches = load_plan(two_stages / "plan.yaml").num_microbatches
    for entry in document["iterations"]:
        timeline = Timeline.from_json(entry["timeline"])
        for spans in timeline.spans:
            kinds = [span.kind for span in spans]
            assert kinds.count("forward") == kinds.count("backward") == microbatches
            assert kinds[-2:] == ["grad_sync", "optimizer"]
            for earlier, later in itertools.pairwise(spans):
                assert earlier.end_ns <= later.start_ns
        for message in timeline.messages:
            assert message.send_ns < message.receive_ns
        ends = [{(s.kind, s.microbatch): s.end_ns for s in spans} for spans in timeline.spans]
        starts = [{(s.kind, s.microbatch): s.start_ns for s in spans} for spans in timeline.spans]
        for microbatch in range(microbatches):
            assert ends[0]["forward", microbatch] <= starts[1]["forward", microbatch]
            assert ends[1]["backward", microbatch] <= starts[0]["backward", microbatch]


def test_parts_bubble_and_exits_are_measured(two_stages: Path) -> None:
    """What the plan predicts of an iteration, as the run saw it."""
    measured = json.loads((two_stages / "measured.json").read_text())
    plan = load_plan(two_stages / "plan.yaml")
    pipeline_s, busy_s = measured["pipeline_s"], measured["busy_s"]
    assert 0.0 < measured["bubble_fraction"] < 1.0
    assert all(0 < busy < pipeline_s for busy in busy_s)
    assert {name: int(one["stage"]) for name, one in measured["exits"].items()} == {"exit_2": 0, "exit_5": 1}
    for one in measured["exits"].values():
        of_all = plan.num_microbatches * (one["forward_s"] + one["backward_s"])
        # A sum of medians may exceed the median of sums.
        assert 0 < of_all < busy_s[int(one["stage"])] * 1.5
    documents = json.loads((two_stages / "timelines.json").read_text())["iterations"]
    idle = [
        1
        - sum(s.end_ns - s.start_ns for spans in t.spans for s in spans if s.kind in ("forward", "backward"))
        / (2 * t.pipeline_ns)
        for t in (Timeline.from_json(entry["timeline"]) for entry in documents)
    ]
    assert min(idle) - 0.02 <= measured["bubble_fraction"] <= max(idle) + 0.02


def test_memory_is_counted_from_the_allocator(two_stages: Path) -> None:
    measured = json.loads((two_stages / "measured.json").read_text())
    plan = load_plan(two_stages / "plan.yaml")
    for stage, state, peak in zip(plan.stages, measured["state_bytes"], measured["peak_bytes"], strict=True):
        assert state == pytest.approx(16 * stage.memory.parameters, rel=0.02)
        kept = plan.run.training.micro_batch_size * plan.run.training.seq_length * 32 * 4
        assert peak > state + stage.memory.in_flight * (stage.last_layer - stage.first_layer + 1) * kept


def test_a_report_can_be_made_of_it(two_stages: Path, tmp_path: Path) -> None:
    summary = write_report(two_stages, tmp_path / "report")
    assert set(summary["losses"]) == {"exit_2", "exit_5", "final"}
    assert learnt(read_run(two_stages), "final") is not None
    assert (tmp_path / "report" / "index.html").stat().st_size > 20_000


def test_a_killed_rank_ends_real_training(tmp_path: Path) -> None:
    """SIGKILL to a rank in the middle of training: one clear line within seconds, and no process is left."""
    out = tmp_path / "run"
    killed: list[tuple[int, float]] = []

    def kill_in_the_middle() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (out / "metrics.jsonl").exists() and records(out, "train"):
                pid = next(p for p in _ranks_of(out) if _environment(p).get("RANK") == "1")
                killed.append((pid, time.monotonic()))
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with pytest.raises(LaunchError) as caught:
        train(tmp_path, training__train_iters=4000)
    took_s = time.monotonic() - killed[0][1]
    killer.join()
    assert str(caught.value).startswith(f"rank 1 (process {killed[0][0]}) was killed by SIGKILL")
    assert took_s < 30
    assert _ranks_of(out) == []


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)


def _ranks_of(out: Path) -> list[int]:
    """Processes that train into ``out`` under a RANK."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(out).encode() in words and "RANK" in _environment(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
