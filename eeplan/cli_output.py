"""What all commands share: arguments of the same name, progress, and how results are printed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eeplan.console import Progress, open_progress
from eeplan.errors import SpecError

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, alone on stdout.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="Run file (run.yaml).")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (plan.yaml).")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder of a run.")]
PipelineSize = Annotated[
    int, typer.Option("--pipeline-size", min=1, help="Stages, each in a process of its own.")
]
TensorSize = Annotated[int, typer.Option("--tensor-size", min=1, help="Processes that share each stage.")]


@contextlib.contextmanager
def work() -> Iterator[Progress]:
    """Progress for the body; what it or a library prints goes to stderr, since stdout is for results."""
    with contextlib.redirect_stdout(sys.stderr), open_progress() as progress:
        yield progress


def print_result(as_json: bool, result: Any, tables: Callable[[], Sequence[Any]]) -> None:
    """Print a result: one JSON document, or tables for people."""
    if as_json:
        print_json(result)
        return
    from eeplan.views import show

    show(tables(), sys.stdout)


def positive_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Values of an option such as ``1,2,4``; empty when it was not given.

    Raises:
        SpecError: not positive whole numbers.
    """
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise SpecError(f"{option} {text}: expected positive numbers as in 1,2,4")
    return tuple(map(int, words))


def print_json(result: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))
