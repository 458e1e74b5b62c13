"""The pure core needs neither torch nor megatron-core, and the command line answers before anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eeplan

ROOT = Path(eeplan.__file__).parent
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} is refused here")

sys.meta_path.insert(0, Refuse())
"""
RUNTIME = ("torch", "megatron")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def pure_modules() -> list[str]:
    files = [
        ROOT / f"{name}.py" for name in ("schema", "spec", "profile", "plan", "timeline", "errors", "files")
    ]
    files += sorted((ROOT / "sim").glob("*.py"))
    return [".".join(("eeplan", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]


def test_the_pure_core_imports_without_torch_and_megatron() -> None:
    modules = pure_modules()
    assert len(modules) > 15
    done = python(REFUSE.format(refused=RUNTIME) + f"\nimport {', '.join(modules)}")
    assert done.returncode == 0, done.stderr


def test_planning_simulating_and_the_report_work_without_torch_and_megatron() -> None:
    modules = (
        "eeplan.cli, eeplan.views, eeplan.demo, eeplan.doctor, eeplan.report.build, eeplan.runtime.preflight"
    )
    done = python(REFUSE.format(refused=RUNTIME) + f"\nimport {modules}")
    assert done.returncode == 0, done.stderr


def test_the_refusal_works() -> None:
    """Negative control: a module of the runtime does fail under the same refusal."""
    done = python(REFUSE.format(refused=RUNTIME) + "\nimport eeplan.runtime.model")
    assert done.returncode == 1
    assert "is refused here" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = ["numpy", "scipy", "pandas", "matplotlib", "yaml", "torch", "megatron", "rich"]
    if arguments == ["--help"]:
        # Typer itself converts option values with pydantic; the first help of all parses none.
        heavy.append("pydantic")
    code = REFUSE.format(refused=heavy) + f"\nfrom eeplan.cli import main\nsys.exit(main({arguments!r}))"
    done = python(code)
    assert done.returncode == 0, done.stderr
