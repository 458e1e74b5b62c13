"""Wrong values of every option of the commands that decode: one line, exit code 2, nothing else."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from small_data import numbered_texts, write_jsonl
from tiny_checkpoint import tiny_model

from eeplan.cli import main

WRONG = {
    "generate run --prompt x": [
        ("--threshold soon", "threshold is 'soon'"),
        ("--threshold nan", "threshold is nan"),
        ("--threshold 0.5 --threshold 0.6 --threshold 0.7", "3 values for 2 exits"),
        ("--threshold calibrated", "has no certificate"),
        ("--mode fast", "mode is 'fast'; expected one of"),
        ("--mode pipeline", "mode is 'pipeline'; one process decodes in mode full or"),
        ("--mode catch_up --pipeline-size 2", "2 processes decode in mode pipeline or full"),
        ("--recompute-limit -1", "recompute limit is -1"),
        ("--exits 2,,4", "exits is '2,,4'; expected depths"),
        ("--exits 3", "the model has no exit at depth 3"),
        ("--exits 2,2", "expected every depth once"),
        ("--confidence luck", "confidence is 'luck'"),
        ("--first-early-token -1", "first early token is -1"),
        ("--temperature nan", "temperature is nan"),
        ("--temperature 1e-320", "expected 0, which takes the most likely token, or at least 0.001"),
        ("--confidence ''", "confidence is ''"),
        ("--candidates 4 --candidate-source ''", "candidate source is ''"),
        ("--top-k 5", "have no effect at temperature 0"),
        ("--temperature 1 --top-p 2", "top_p is 2.0"),
        ("--repetition-penalty 0", "repetition penalty is 0.0"),
        ("--seed -1", "seed is -1"),
        ("--stop ''", "stop is an empty text"),
        ("--dtype int8", "dtype is 'int8'; expected one of fp32, bf16, fp16"),
        ("--pipeline-size 7", "expected 1 to 6, the number of the model's layers"),
        ("--tensor-size 3", "tensor size is 3"),
        ("--pipeline-size 2 --compare-full", "--compare-full is for one process"),
        (f"--prompt {'x' * 65}", "the prompt has 65 tokens"),
        ("--prompt ''", "the prompt is empty"),
    ],
    "serve run --port 0": [
        ("--mode full --candidates 4", "mode 'full' checks no exit"),
        ("--candidates 999", "at most the 257 tokens"),
        ("--candidate-source frequent", "is not there any more"),
        ("--measure-candidates", "there are none"),
        ("--mode warp", "mode is 'warp'"),
        ("--host ''", "the host is empty"),
        ("--host 999.1.1.1", "cannot listen on 999.1.1.1"),
        ("--api-key-file empty.key", "the API key is empty"),
        ("--model-name ''", "the model's name is empty"),
        ("--grace nan", "grace_s is nan"),
        ("--max-running 0", "max_running is 0"),
        ("--api-key-file absent", "absent"),
        ("--dtype x", "dtype is 'x'"),
    ],
    "chat run": [
        ("--mode warp", "mode is 'warp'"),
        ("--temperature -1", "temperature is -1.0"),
        ("--threshold 2", "threshold is 2.0"),
    ],
    "calibrate run --data docs.jsonl": [
        ("--risk 1", "risk is 1.0"),
        ("--metric beauty", "metric is 'beauty'"),
        ("--max-tokens 0", "max tokens is 0"),
        ("--data absent", "absent is no text file"),
    ],
    "evaluate run --data docs.jsonl": [
        ("--confidence luck", "confidence is 'luck'"),
        ("--max-tokens 10", "less than one sequence of 64"),
        ("--profile absent", "absent"),
        ("--usage-out run", "run"),
    ],
}
CASES = [(command, *case) for command, cases in WRONG.items() for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("wrong")
    (found / "run").mkdir()
    with tiny_model(found / "run"):
        (found / "empty.key").write_text("\n")
        write_jsonl(found / "docs.jsonl", numbered_texts(30, words=20))
    return found


@pytest.mark.parametrize(("command", "options", "message"), CASES, ids=lambda part: str(part)[:40])
def test_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(f"{command} {options}")) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("eeplan: error: ")
    assert message in line
