"""A small world on disk for tests of the command line: data, run file, profile and plan that fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from builders import make_profile, run_document

from eeplan.plan import write_plan
from eeplan.runtime.data import build_from_texts
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.schema import write_yaml
from eeplan.sim.planner import make_plan
from eeplan.spec import load_run

TEXTS = [f"Document {i} says that {i} times {i} is {i * i}, and nothing else.\n" * 4 for i in range(40)]


def make_world(folder: Path) -> Path:
    """Write run.yaml, data/, profile.yaml, plan.yaml and some input texts to ``folder``."""
    build_from_texts(TEXTS, folder / "data" / "text", byte_tokenizer())
    document = run_document(
        model__vocab_size=257, data__tokenizer="data/text.tokenizer.json", exits={"count": 1}
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    run, run_sha256 = load_run(folder / "run.yaml")
    profile = make_profile(run)
    write_yaml(folder / "profile.yaml", profile)
    write_plan(folder / "plan.yaml", make_plan(run, run_sha256, profile, "0" * 64))
    (folder / "some.txt").write_text("some text\n")
    (folder / "some.jsonl").write_text(json.dumps({"text": "a line"}) + "\n")
    return folder


def edit_yaml(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the document in ``path``."""
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below ``folder`` with its content, every folder with None."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
