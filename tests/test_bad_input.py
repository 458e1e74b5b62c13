"""Malformed and impossible input of every kind: one line, exit code 2, no traceback, nothing written.

Each case changes one thing in a small world where everything fits (``world.py``), or asks for something
impossible in it. ``test_the_world_itself_is_fine`` is the control: the same commands succeed unchanged.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world import edit_yaml, tree

from eeplan.cli import main

PLAN_IT = "plan run.yaml --profile profile.yaml -o new/plan.yaml"
TRAIN_IT = "train plan.yaml --out new/run"
Arrange = Callable[[], object]


def check_refusal(
    world: Path, arrange: Arrange, arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arrange()
    before = tree(world)
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    # What would help may follow, on lines of its own.
    assert all(line.startswith("  ") for line in lines[1:]), err
    assert len(lines) == 1 or "device_memory_bytes" in lines[0], err
    assert lines[0].startswith("eeplan: error: ")
    assert expected in lines[0]
    assert out == ""
    assert tree(world) == before


def run_key(dotted: str, value: Any) -> Arrange:
    """Set one key of the run file."""

    def change(document: dict[str, Any]) -> None:
        *parents, last = dotted.split(".")
        for parent in parents:
            document = document.setdefault(parent, {})
        document[last] = value

    return lambda: edit_yaml(Path("run.yaml"), change)


def no_run_key(section: str, key: str) -> Arrange:
    return lambda: edit_yaml(Path("run.yaml"), lambda document: document[section].pop(key))


def write(path: str, text: str | bytes) -> Arrange:
    return lambda: Path(path).write_bytes(text.encode() if isinstance(text, str) else text)


def exits(*layers: dict[str, Any], **more: Any) -> Arrange:
    return run_key("exits", {"layers": list(layers), **more})


def two_keys() -> None:
    with Path("run.yaml").open("a") as file:
        file.write("name: again\n")


RUN_CASES: dict[str, tuple[Arrange, str]] = {
    "a misspelt key": (run_key("model.num_layer", 8), "did you mean 'num_layers'?"),
    "an unknown section": (run_key("wandb", {}), "unknown key 'wandb'; valid keys: "),
    "a word for a number": (run_key("model.num_layers", "eight"), "'model.num_layers' has value 'eight'"),
    "a quoted number": (run_key("model.num_layers", "8"), "should be a valid integer"),
    "a fraction of a layer": (run_key("model.num_layers", 8.5), "model.num_layers"),
    "true for a number": (run_key("model.num_layers", True), "model.num_layers"),
    "a list for a section": (run_key("model", [1, 2]), "key 'model' has value [1, 2]"),
    "a missing key": (no_run_key("model", "hidden_size"), "missing key 'model.hidden_size'; add it"),
    "a negative size": (run_key("training.micro_batch_size", -2), "greater than 0"),
    "no layers": (run_key("model.num_layers", 0), "greater than 0"),
    "another version": (run_key("schema_version", 2), "schema_version"),
    "an unknown precision": (run_key("training.precision", "fp64"), "'fp32', 'bf16' or 'fp16'"),
    "not a number": (run_key("training.lr", math.nan), "training.lr"),
    "infinity": (run_key("training.lr", math.inf), "training.lr"),
    "an exit outside the model": (exits({"layer": 9}), "exit after layer 9 is outside the model"),
    "an exit at the end": (exits({"layer": 8}), "is the final exit itself"),
    "an exit below all layers": (exits({"layer": 1, "boundary": "before"}), "has no layer below it"),
    "the same exit twice": (
        exits({"layer": 6}, {"layer": 7, "boundary": "before"}),
        "exit before layer 7 and exit after layer 6 both read",
    ),
    "an unknown head": (exits({"layer": 4, "head": "big"}), "exits.layers[0].head"),
    "a negative loss weight": (exits({"layer": 4, "weight": -1.0}), "exits.layers[0].weight"),
    "a count and layers": (exits({"layer": 4}, count=1), "either exits.count or exits.layers"),
    "more exits than room": (run_key("exits", {"count": 8}), "room for 7 early exits"),
    "half an exit": (run_key("exits", {"count": 0.5}), "exits.count"),
    "heads not divisible by TP": (
        run_key("parallel.tensor_model_parallel_size", 3),
        "num_attention_heads 4 is not divisible by parallel.tensor_model_parallel_size 3",
    ),
    "hidden size not divisible by heads": (run_key("model.num_attention_heads", 5), "not divisible by"),
    "query groups that do not divide": (run_key("model.num_query_groups", 3), "num_query_groups 3"),
    "an odd head": (run_key("model.hidden_size", 36), "rotary embedding needs an even number"),
    "layers not divisible by PP": (
        run_key("parallel.pipeline_model_parallel_size", 3),
        "num_layers 8 is not divisible by parallel.pipeline_model_parallel_size 3",
    ),
    "a batch that does not divide": (run_key("training.global_batch_size", 15), "not divisible by"),
    "a warm-up longer than training": (run_key("training.lr_warmup_iters", 5), "lower it"),
    "a learning rate that rises": (run_key("training.min_lr", 1.0), "exceeds training.lr"),
    "two numbers for a split": (run_key("data.split", "95,5"), "expected three numbers"),
    "not YAML": (write("run.yaml", "model: {num_layers: 8"), "not valid YAML at line"),
    "an empty file": (write("run.yaml", ""), "found an empty file"),
    "a list": (write("run.yaml", "- 1\n- 2\n"), "found a list"),
    "a key twice": (two_keys, "key 'name' is given twice"),
    "a key that is a list": (write("run.yaml", "? [a, b]\n: 1\n"), "a key must be a word"),
    "bytes that are not text": (write("run.yaml", b"\xff\xfe\x00"), "not UTF-8"),
    "a control character": (write("run.yaml", "name: \x07\n"), "not valid YAML"),
    "a document that contains itself": (write("run.yaml", "model: &a [*a]\n"), "run.yaml"),
    "a thousand brackets": (write("run.yaml", "model: " + "[" * 3000), "run.yaml"),
    "a Python object": (write("run.yaml", "model: !!python/object/apply:os.getcwd []\n"), "not valid YAML"),
    "a folder": (lambda: (Path("run.yaml").unlink(), Path("run.yaml").mkdir()), "is a directory"),
    "no file": (lambda: Path("run.yaml").unlink(), "run file run.yaml does not exist"),
    "too little memory": (run_key("limits.device_memory_bytes", 1000), "device_memory_bytes"),
    "a micro batch that was not measured": (run_key("training.micro_batch_size", 4), "profile has no"),
    "another model than the profile's": (
        run_key("model.hidden_size", 128),
        "profile is of another model: it was measured with hidden_size 64, the run file has 128",
    ),
}


@pytest.mark.parametrize("name", RUN_CASES)
def test_run_file(name: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, expected = RUN_CASES[name]
    check_refusal(world, arrange, PLAN_IT.split(), expected, capfd)


def profile_change(change: Callable[[dict[str, Any]], object]) -> Arrange:
    return lambda: edit_yaml(Path("profile.yaml"), change)


PROFILE_CASES: dict[str, tuple[Arrange, str]] = {
    "no file": (lambda: Path("profile.yaml").unlink(), "profile profile.yaml does not exist"),
    "a run file": (lambda: shutil.copy("run.yaml", "profile.yaml"), "profile profile.yaml"),
    "an op twice": (profile_change(lambda p: p["ops"].append(p["ops"][0])), "is given twice; keep one"),
    "an op missing": (
        profile_change(lambda p: p.update(ops=[o for o in p["ops"] if o["op"] != "layer"])),
        "profile has no 'layer'",
    ),
    "an unknown op": (profile_change(lambda p: p["ops"][0].update(op="soul")), "ops[0].op"),
    "negative time": (profile_change(lambda p: p["ops"][0]["forward"].update(median_s=-1.0)), "median_s"),
    "endless bandwidth": (
        profile_change(lambda p: p["p2p"].update(bandwidth_bytes_per_s=math.inf)),
        "bandwidth_bytes_per_s",
    ),
}


@pytest.mark.parametrize("name", PROFILE_CASES)
def test_profile(name: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, expected = PROFILE_CASES[name]
    check_refusal(world, arrange, PLAN_IT.split(), expected, capfd)


def plan_text(old: str, new: str) -> Arrange:
    def arrange() -> None:
        text = Path("plan.yaml").read_text()
        assert old in text
        Path("plan.yaml").write_text(text.replace(old, new, 1))

    return arrange


PLAN_CASES: dict[str, tuple[Arrange, str]] = {
    "no file": (lambda: Path("plan.yaml").unlink(), "plan plan.yaml does not exist"),
    "edited by hand": (
        plan_text("num_microbatches: 8", "num_microbatches: 9"),
        "it was edited, or written by another version",
    ),
    "a weight edited by hand": (plan_text("effective_weight: 0", "effective_weight: 1"), "it was edited"),
    "a run file": (lambda: shutil.copy("run.yaml", "plan.yaml"), "plan plan.yaml: "),
    "cut in the middle": (
        lambda: Path("plan.yaml").write_text(Path("plan.yaml").read_text()[:900]),
        "plan plan.yaml: ",
    ),
}


@pytest.mark.parametrize("command", ["simulate plan.yaml", TRAIN_IT])
@pytest.mark.parametrize("name", PLAN_CASES)
def test_plan(name: str, command: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, expected = PLAN_CASES[name]
    check_refusal(world, arrange, command.split(), expected, capfd)


def data_bytes(ending: str, change: Callable[[bytes], bytes]) -> Arrange:
    path = Path(f"data/text{ending}")
    return lambda: path.write_bytes(change(path.read_bytes()))


def other_plan_ran_here() -> None:
    edit_yaml(Path("run.yaml"), lambda document: document["training"].update(seed=7))
    assert main(["plan", "run.yaml", "--profile", "profile.yaml", "-o", "new/run/plan.yaml", "--json"]) == 0


def half_a_plan_lies_here() -> None:
    Path("new/run").mkdir(parents=True)
    Path("new/run/plan.yaml").write_text(Path("plan.yaml").read_text()[:900])


def a_file_stands_there() -> None:
    Path("new").write_text("")


TRAIN_CASES: dict[str, tuple[Arrange, str, str]] = {
    "tokens missing": (lambda: Path("data/text.bin").unlink(), TRAIN_IT, "text.bin does not exist"),
    "index missing": (lambda: Path("data/text.idx").unlink(), TRAIN_IT, "text.idx does not exist"),
    "summary missing": (lambda: Path("data/text.json").unlink(), TRAIN_IT, "data summary"),
    "summary damaged": (data_bytes(".json", lambda b: b[:-20]), TRAIN_IT, "is not JSON"),
    "tokens cut": (data_bytes(".bin", lambda b: b[:-2]), TRAIN_IT, "truncated or from another build"),
    "index of another format": (data_bytes(".idx", lambda b: b"GGUF" + b[4:]), TRAIN_IT, "MMIDIDX"),
    "index cut": (data_bytes(".idx", lambda b: b[:-8]), TRAIN_IT, "is truncated"),
    "index with a flipped bit": (
        data_bytes(".idx", lambda b: b[:40] + bytes([b[40] ^ 4]) + b[41:]),
        TRAIN_IT,
        "text.idx",
    ),
    "index empty": (write("data/text.idx", b""), TRAIN_IT, "text.idx"),
    "tokenizer missing": (
        lambda: Path("data/text.tokenizer.json").unlink(),
        TRAIN_IT,
        "text.tokenizer.json does not exist",
    ),
    "tokenizer damaged": (write("data/text.tokenizer.json", "{"), TRAIN_IT, "is not JSON"),
    "too few processes": (lambda: None, TRAIN_IT + " --nproc 1", "--nproc is 1; the plan needs 2 processes"),
    "no processes": (lambda: None, TRAIN_IT + " --nproc 0", "Invalid value for '--nproc'"),
    "a number in words": (lambda: None, TRAIN_IT + " --nproc two", "Invalid value for '--nproc'"),
    "out holds another plan": (other_plan_ran_here, TRAIN_IT, "holds the run of another plan"),
    "out holds half a plan": (half_a_plan_lies_here, TRAIN_IT, "run directory new/run is damaged"),
    "out is a file": (a_file_stands_there, "train plan.yaml --out new", "new is a file"),
    "out is below a file": (a_file_stands_there, TRAIN_IT, "new is a file"),
}


@pytest.mark.parametrize("name", TRAIN_CASES)
def test_train(name: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, command, expected = TRAIN_CASES[name]

    def arranged() -> None:
        arrange()
        capfd.readouterr()

    check_refusal(world, arranged, command.split(), expected, capfd)


BUILD_IT = "data build {} -o built --tokenizer byte"
BUILD_CASES: dict[str, tuple[Arrange, str, str]] = {
    "no input": (lambda: None, BUILD_IT.format(""), "Missing argument 'INPUT...'"),
    "an input that is not there": (lambda: None, BUILD_IT.format("absent.txt"), "absent.txt cannot be read"),
    "a folder": (lambda: None, BUILD_IT.format("data"), "input data is a folder"),
    "not UTF-8": (
        write("some.txt", b"ab\xffcd"),
        BUILD_IT.format("some.txt"),
        "byte 0xff at offset 2",
    ),
    "a broken line": (
        write("some.jsonl", '{"text": "a"}\n{"text"\n'),
        BUILD_IT.format("some.jsonl"),
        ":2: not",
    ),
    "a line without text": (
        write("some.jsonl", '{"txt": "a"}\n'),
        BUILD_IT.format("some.jsonl"),
        "no key 'text'",
    ),
    "a number for text": (write("some.jsonl", '{"text": 1}\n'), BUILD_IT.format("some.jsonl"), "holds int"),
    "no text at all": (write("some.txt", ""), BUILD_IT.format("some.txt"), "hold no text"),
    "a vocabulary for bytes": (
        lambda: None,
        BUILD_IT.format("some.txt") + " --vocab-size 300",
        "vocabulary size 300 has no effect",
    ),
    "a vocabulary too small": (
        lambda: None,
        "data build some.txt -o new/data/text --tokenizer bpe --vocab-size 12",
        "vocabulary size 12 is too small",
    ),
    "a tokenizer that is not there": (
        lambda: None,
        "data build some.txt -o new/data/text --tokenizer my.json",
        "my.json does not exist",
    ),
    "an output below a file": (
        a_file_stands_there,
        "data build some.txt -o new/text",
        "choose another output",
    ),
    "an output over its input": (
        lambda: shutil.copy("some.txt", "x.bin"),
        "data build x.bin -o x --tokenizer byte",
        "would be overwritten",
    ),
}


@pytest.mark.parametrize("name", BUILD_CASES)
def test_data_build(name: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, command, expected = BUILD_CASES[name]
    check_refusal(world, arrange, command.split(), expected, capfd)


OTHER_CASES: dict[str, tuple[Arrange, str, str]] = {
    "plan into a folder": (
        lambda: Path("new").mkdir(),
        "plan run.yaml --profile profile.yaml -o new",
        "plan new is a directory",
    ),
    "plan below a file": (a_file_stands_there, PLAN_IT, "new is a file"),
    "profile into a folder": (lambda: Path("new").mkdir(), "profile run.yaml -o new", "is a directory"),
    "profile of a broken run": (run_key("model.num_layers", 0), "profile run.yaml -o new.yaml", "num_layers"),
    "trace into a folder": (lambda: Path("new").mkdir(), "simulate plan.yaml --trace new", "is a directory"),
    "a narrow drawing": (lambda: None, "simulate plan.yaml --ascii --width 3", "Invalid value for '--width'"),
    "no checkpoint": (lambda: None, "generate absent --prompt a --threshold 0.5", "absent does not exist"),
    "a folder without checkpoint": (
        lambda: None,
        "generate data --prompt a --threshold 0.5",
        "data is no checkpoint",
    ),
    "a threshold above one": (lambda: None, "generate data --prompt a --threshold 1.5", "threshold"),
    "a threshold in words": (
        lambda: None,
        "generate data --prompt a --threshold high",
        "threshold is 'high'",
    ),
    "a report of nothing": (lambda: None, "report absent -o new", "absent"),
    "a report of a folder without a run": (lambda: None, "report data -o new", "data"),
    "an unknown command": (lambda: None, "pln run.yaml", "Did you mean 'plan'?; see `eeplan --help`"),
    "an unknown option": (lambda: None, "plan run.yaml --profil x", "No such option: --profil"),
    "a missing option": (lambda: None, "plan run.yaml -o x", "Missing option '--profile'; see `eeplan plan"),
    "a missing argument": (lambda: None, "plan", "Missing argument 'RUN'; see `eeplan plan --help`"),
    "a word too many": (lambda: None, "simulate plan.yaml more", "unexpected extra argument"),
    "half a command": (lambda: None, "data", "Missing command; see `eeplan data --help`"),
    "a demo below a file": (a_file_stands_there, "demo --out new/demo", "new is a file"),
}


@pytest.mark.parametrize("name", OTHER_CASES)
def test_other_commands(name: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrange, command, expected = OTHER_CASES[name]
    check_refusal(world, arrange, command.split(), expected, capfd)


def test_an_empty_prompt(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "data", "--prompt", "", "--threshold", "0.5"]
    check_refusal(world, lambda: None, arguments, "the prompt is empty", capfd)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", [PLAN_IT, TRAIN_IT, BUILD_IT.format("some.txt")])
def test_a_folder_without_permission(command: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world.chmod(0o555)
    try:
        check_refusal(world, lambda: None, command.split(), "", capfd)
    finally:
        world.chmod(0o755)


def test_permission_is_asked_for_before_anything_is_written(
    world: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and allowed(path, mode))
    check_refusal(world, lambda: None, TRAIN_IT.split(), "no permission in", capfd)


def test_the_world_itself_is_fine(
    world: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control for all cases above: unchanged, the commands get as far as they can without ranks."""
    started = []
    monkeypatch.setattr("eeplan.runtime.preflight.launch", lambda *args, **kwargs: started.append(args))
    monkeypatch.setattr("eeplan.cli._read_json", lambda path: {})
    assert main(PLAN_IT.split()) == 0
    assert main(["simulate", "plan.yaml"]) == 0
    assert main(BUILD_IT.format("some.txt some.jsonl").split()) == 0
    assert main([*TRAIN_IT.split(), "--nproc", "2"]) == 0
    assert [args[0] for args in started] == ["eeplan.runtime.train"]
    assert "error" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (PLAN_IT.replace("run.yaml", "absent.yaml"), "run file absent.yaml does not exist"),
        (TRAIN_IT + " --nproc 3", "the plan needs 2 processes"),
    ],
)
def test_as_a_process(arguments: str, expected: str, world: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eeplan", *arguments.split()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("eeplan: error: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
