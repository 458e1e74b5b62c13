"""Filled schedules read the right text, and a whole training run with them leaves the right books."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from small_data import build_small, run_for
from world import edit_yaml, make_world

from eeplan.cli import main
from eeplan.plan import load_plan
from eeplan.runtime.batches import RankInfo, build_batches
from eeplan.sim.fill import fill_of, schedule_of
from eeplan.sim.schedule import Op


def test_microbatches_are_read_by_number(tmp_path: Path) -> None:
    """In any order and any number of times, they are those that come one after the other."""
    run = run_for(build_small(tmp_path), parallel__data_parallel_size=2, training__train_iters=3)
    place = RankInfo(1, 2)
    whole = [batch["tokens"].tolist() for batch in build_batches(run, rank_info=place)]
    stream = build_batches(run, rank_info=place)
    for start in (0, 4, 8):
        assert stream.consumed_samples == start * 4
        for ahead in (3, 0, 2, 2, 1):
            assert stream.read(ahead)["tokens"].tolist() == whole[start + ahead]
        stream.advance(4)
    assert len(stream) == 0
    with pytest.raises(IndexError, match="sample 48 is none of the run's 48"):
        stream.read(0)
    with pytest.raises(ValueError, match="no position of this stream"):
        stream.advance(1)


def test_extra_microbatches_lengthen_training_alone(tmp_path: Path) -> None:
    run = run_for(build_small(tmp_path), parallel__data_parallel_size=2, training__train_iters=3)
    place = RankInfo(0, 2)
    assert len(build_batches(run, rank_info=place, extra_microbatches=5)) == 3 * (4 + 5)
    assert build_batches(run, rank_info=place, extra_microbatches=5).num_samples == 3 * (16 + 5 * 4)
    assert len(build_batches(run, rank_info=place, split="valid", extra_microbatches=5)) == 4 * 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.yaml and run/: three iterations with one insert in each region."""
    folder = make_world(tmp_path_factory.mktemp("filled"))

    def fill(document: dict) -> None:
        document["exits"] = {"layers": [{"layer": 2}]}
        document["training"]["train_iters"] = 3
        document["fill"] = {"policy": {"warmup": 1, "cooldown": 1}}

    edit_yaml(folder / "run.yaml", fill)
    plan = str(folder / "plan.yaml")
    assert (
        main(["plan", str(folder / "run.yaml"), "--profile", str(folder / "profile.yaml"), "-o", plan]) == 0
    )
    assert main(["train", plan, "--out", str(folder / "run")]) == 0
    return folder


def test_the_measured_ops_are_those_of_the_schedule(trained: Path) -> None:
    plan = load_plan(trained / "plan.yaml")
    schedule = schedule_of(plan)
    assert [kind.name for kind in schedule.kinds[8:]] == ["truncated", "warm_up"]
    names = {Op.FORWARD: "forward", Op.BACKWARD: "backward"}
    recorded = json.loads((trained / "run" / "timelines.json").read_text())["iterations"]
    assert recorded
    for iteration in recorded:
        for program, spans in zip(schedule.stages, iteration["timeline"]["spans"], strict=True):
            wanted = [(names[i.op], i.microbatch) for i in program if i.op in names]
            assert [(s["kind"], s["microbatch"]) for s in spans if s["microbatch"] >= 0] == wanted


def test_samples_are_counted_with_the_inserts(trained: Path) -> None:
    fill = fill_of(load_plan(trained / "plan.yaml"))
    assert (fill.num_full, fill.num_microbatches) == (8, 10)
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["consumed_samples"] for line in train] == [20, 40, 60]
    for line in train:
        assert set(line["losses"]) == {"exit_2", "final"}
        # A small untrained model knows nothing: the loss of 257 equally likely bytes, for every head.
        assert all(4.5 < loss < 6.5 for loss in line["losses"].values())


def test_a_filled_run_is_simulated_and_reported(
    trained: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", str(trained / "plan.yaml"), "--json"]) == 0
    simulated = json.loads(capfd.readouterr().out)
    plan = yaml.safe_load((trained / "plan.yaml").read_text())
    assert simulated["pipeline_s"] == pytest.approx(plan["prediction"]["pipeline_s"])
    assert main(["report", str(trained / "run"), "-o", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "index.html").exists()
