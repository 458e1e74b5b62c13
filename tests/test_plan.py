from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from builders import make_plan, make_profile, make_run, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import FileError, PlanError, SchemaError
from eeplan.plan import Plan, content_hash, load_plan, write_plan
from eeplan.schema import dump_yaml, parse_yaml, validate
from eeplan.spec import load_run


def written(folder: Path) -> tuple[Path, Plan]:
    """A plan of a run file in ``folder``, written there."""
    run, _ = load_run(write_run(folder / "run.yaml", make_run(exits__count=2)))
    path = folder / "plan.yaml"
    return path, write_plan(path, make_plan(run))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(0, 3), st.sampled_from(["auto", "deferred", "eager"]))
def test_a_plan_survives_its_yaml_to_the_last_digit(seed: int, count: int, mode: str) -> None:
    run = make_run(exits={"count": count, "exit_forward": mode}, limits__device_memory_bytes=2**33)
    plan = make_plan(run, make_profile(run, seed=seed, jitter=0.9))
    assert validate(parse_yaml(dump_yaml(plan).encode(), "plan"), Plan, "plan") == plan


def test_a_written_plan_is_read_back_with_its_hash(tmp_path: Path) -> None:
    path, plan = written(tmp_path)
    loaded = load_plan(path)
    assert plan.content_sha256 == loaded.content_sha256 == content_hash(plan)
    assert loaded.model_copy(update={"run": plan.run}) == plan
    assert path.read_text().startswith("# Written by `eeplan plan`.")


def test_data_paths_are_relative_in_the_file_and_absolute_in_memory(tmp_path: Path) -> None:
    path, plan = written(tmp_path)
    assert plan.run.data.data_path == "data/text"
    assert str(tmp_path) not in path.read_text()
    assert load_plan(path).run.data.data_path == str(tmp_path / "data" / "text")


def test_a_plan_moves_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path, _ = written(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = load_plan(tmp_path / "there" / path.name)
    assert moved.run.data.tokenizer == str(tmp_path / "there" / "data" / "tokenizer.json")


def test_writing_a_loaded_plan_elsewhere_keeps_its_data(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    copy = tmp_path / "run" / "plan.yaml"
    write_plan(copy, load_plan(path))
    assert load_plan(copy).run.data == load_plan(path).run.data


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("prediction", "iteration_time_s", 1.0),
        ("run", "name", "other"),
        (None, "num_microbatches", 9),
        (None, "exit_forward", "eager"),
        (None, "run_sha256", "2" * 64),
        (None, "content_sha256", ""),
        (None, "content_sha256", "3" * 64),
    ],
)
def test_an_edited_plan_is_refused(tmp_path: Path, section: str | None, key: str, value: object) -> None:
    path, _ = written(tmp_path)
    document = yaml.safe_load(path.read_text())
    node = document[section] if section else document
    assert node[key] != value
    node[key] = value
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(PlanError, match=r"content_sha256 is \w+…, its content hashes to .*plan again"):
        load_plan(path)


def test_comments_and_layout_may_change(tmp_path: Path) -> None:
    """Negative control of the hash: it covers the content, not the spelling."""
    path, _ = written(tmp_path)
    document = yaml.safe_load(path.read_text())
    path.write_text("# seen\n" + yaml.safe_dump(document, sort_keys=True, width=40))
    assert load_plan(path).num_microbatches == 8


def test_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace("exit_forward: deferred", "exit_foward: deferred"))
    with pytest.raises(SchemaError, match=r"unknown key 'exit_foward'; did you mean 'exit_forward'\?"):
        load_plan(path)
    with pytest.raises(FileError, match=r"plan .* does not exist"):
        load_plan(tmp_path / "none.yaml")


def test_a_run_that_turned_impossible_inside_a_plan_is_named(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace("    num_layers: 8", "    num_layers: 7"))
    with pytest.raises(SchemaError, match=r"run: model.num_layers 7 is not divisible by"):
        load_plan(path)


def test_the_final_loss_has_weight_one() -> None:
    assert make_plan(make_run()).final_exit_weight == 1.0
