"""The README's commands: cheap ones run, expensive ones are parsed, the big two stand in the Makefile."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from builders import make_profile
from world import TEXTS

from eeplan.cli import app
from eeplan.schema import write_yaml
from eeplan.spec import load_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.S)
BLOCKS = [(match["mark"] or "", match["language"], match["text"]) for match in BLOCK.finditer(README)]


def test_every_shell_block_is_accounted_for() -> None:
    shell = [(mark, text.strip()) for mark, language, text in BLOCKS if language == "sh"]
    assert [text for mark, text in shell if not mark] == ["make demo", "make test"]
    assert {mark for mark, _ in shell if mark} == {"run", "parse"}


def test_the_two_commands_stand_in_the_makefile() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    assert {"demo", "test"} <= set(targets)
    assert "demo --out reports/demo" in (ROOT / "Makefile").read_text()


def test_cheap_blocks_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{index}.txt").write_text(text)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = []
    for mark, language, text in BLOCKS:
        if mark.startswith("file: "):
            (tmp_path / mark.removeprefix("file: ")).write_text(text)
        elif text.startswith("eeplan profile"):
            # What it measures takes half a minute; a synthetic profile stands in.
            run, _ = load_run(tmp_path / "run.yaml")
            write_yaml(tmp_path / "profile.yaml", make_profile(run))
        elif mark == "run":
            assert language == "sh"
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, text + done.stderr
            ran.append(done.stdout)
    assert "exits.placement" in ran[1]
    assert ran[2].startswith("stage 0")
    assert float(ran[3]) > 0


@pytest.mark.parametrize("text", [text for mark, _, text in BLOCKS if mark == "parse"])
def test_expensive_blocks_are_valid_command_lines(text: str) -> None:
    name, command, *arguments = shlex.split(text)
    assert name == "eeplan"
    typer.main.get_command(app).commands[command].make_context(command, arguments, resilient_parsing=False)


def test_every_command_is_in_the_tour() -> None:
    for command in typer.main.get_command(app).commands:
        if command != "bench":
            assert f"eeplan {command}" in README


def test_local_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    if missing and not (ROOT / "reports" / "demo").exists():
        assert all(link.startswith("reports/demo/") for link in missing)
        pytest.skip("reports/demo is not there; `make demo` makes it")
    assert missing == []
