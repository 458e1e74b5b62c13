"""The command line: parses, calls, prints. No logic, and nothing heavy is imported before it is needed.

Results go to stdout (with ``--json`` one JSON document and nothing else), progress and errors to stderr. Exit
codes: 0; 2 for an error of the input, told in one line, with what helps below it where that was searched; 75
for training that saved and ended on SIGTERM or SIGUSR1; 130 after Ctrl-C; 1 for a bug of our own, with its
traceback, and for a failed ``doctor``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from eeplan import __version__, cli_bench, cli_decoding, cli_planning, cli_rehearsal, cli_serving
from eeplan.cli_output import Json, PlanFile, RunFile, positive_numbers
from eeplan.cli_output import print_result as _print
from eeplan.cli_output import work as _work
from eeplan.errors import EeplanError, Preempted

# Typer's rich mode would cost 0.1 s for every --help.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(rich_markup_mode=None, help="Build training data.")
app.add_typer(data_app, name="data")
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_decoding.app)
app.add_typer(cli_planning.app)
app.add_typer(cli_rehearsal.app)
app.add_typer(cli_serving.app)


@dataclass(slots=True)
class _Options:
    """What the options before the command set."""

    debug: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. ``arguments`` is ``sys.argv[1:]`` when None."""
    options = _Options()
    try:
        command = typer.main.get_command(app)
        args = list(sys.argv[1:] if arguments is None else arguments)
        code = command.main(args, prog_name="eeplan", standalone_mode=False, obj=options)
    except Preempted as stopped:
        print(f"eeplan: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except EeplanError as error:
        return _fail(str(error), options, error.details)
    except typer.TyperException as error:
        return _fail(_usage(error), options)
    except (KeyboardInterrupt, typer.Abort):
        print("eeplan: interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def _fail(message: str, options: _Options, details: Sequence[str] = ()) -> int:
    if options.debug:
        traceback.print_exc()
    print(f"eeplan: error: {' '.join(message.split())}", file=sys.stderr)
    for line in details:
        print(f"  {line}", file=sys.stderr)
    return 2


def _usage(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "eeplan"
    return f"{error.format_message().rstrip('.')}; see `{path} --help`"


@app.callback(invoke_without_command=True)
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Plan, simulate, train and serve early-exit language models."""
    context.obj.debug = debug
    if version:
        print(f"eeplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def profile(
    run: RunFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROFILE", help="Profile to write.")],
    micro_batch_sizes: Annotated[
        str | None,
        typer.Option("--micro-batch-sizes", metavar="SIZES", help="As in 1,2,4; else the run's own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure on this device what every op of a run costs."""
    from eeplan.files import require_writable_file
    from eeplan.runtime.preflight import require_runtime
    from eeplan.schema import write_yaml
    from eeplan.spec import load_run
    from eeplan.views import profile_tables

    with _work() as progress:
        spec, _ = load_run(run)
        sizes = positive_numbers("--micro-batch-sizes", micro_batch_sizes)
        require_writable_file(output, "profile")
        require_runtime()
        from eeplan.runtime.profiler import measure

        with progress.step("measure ops", announce=True):
            measured = measure(spec, micro_batch_sizes=sizes, progress=progress.update)
        write_yaml(output, measured, "Written by `eeplan profile`.")
    _print(
        as_json, {"profile": str(output)} | measured.model_dump(mode="json"), lambda: profile_tables(measured)
    )


@app.command()
def plan(
    run: RunFile,
    profile: Annotated[Path, typer.Option("--profile", help="Measured op costs (profile.yaml).")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PLAN", help="Plan to write.")],
    usage: Annotated[
        Path | None,
        typer.Option("--usage", help="How often tokens leave early (usage.yaml); else the run's prior."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place exits, say why, predict time and memory."""
    from eeplan.files import require_writable_file
    from eeplan.plan import write_plan
    from eeplan.plan_views import plan_tables
    from eeplan.profile import load_profile
    from eeplan.sim.planner import make_plan
    from eeplan.spec import load_run
    from eeplan.usage import load_usage

    with _work():
        spec, run_sha256 = load_run(run)
        costs, profile_sha256 = load_profile(profile)
        require_writable_file(output, "plan")
        used = load_usage(usage) if usage else (None, None)
        made = write_plan(output, make_plan(spec, run_sha256, costs, profile_sha256, *used))
    _print(as_json, {"plan": str(output)} | made.model_dump(mode="json"), lambda: plan_tables(made))


@app.command()
def simulate(
    plan: PlanFile,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a Perfetto trace of the iteration.")
    ] = None,
    ascii_art: Annotated[bool, typer.Option("--ascii", help="Draw the schedule as text.")] = False,
    width: Annotated[int, typer.Option("--width", min=20, help="Columns of the drawing.")] = 100,
    as_json: Json = False,
) -> None:
    """Simulate one training iteration of a plan."""
    from eeplan.files import require_writable_file, write_text
    from eeplan.plan import load_plan
    from eeplan.plan_views import simulation_result, simulation_tables
    from eeplan.sim.ascii import render
    from eeplan.sim.costs import pipeline_costs_of
    from eeplan.sim.critical_path import critical_path, event_graph
    from eeplan.sim.engine import simulate as run_simulation
    from eeplan.sim.fill import schedule_of
    from eeplan.sim.trace import perfetto

    with _work():
        loaded = load_plan(plan)
        if trace:
            require_writable_file(trace, "trace")
        schedule, costs = schedule_of(loaded), pipeline_costs_of(loaded)
        timeline = run_simulation(schedule, costs)
        if trace:
            path = critical_path(event_graph(schedule, timeline, costs.transport))
            write_text(trace, json.dumps(perfetto({"predicted": timeline}, {"predicted": path})))
        result = simulation_result(loaded, timeline) | ({"trace": str(trace)} if trace else {})
    drawing = render(timeline, width) if ascii_art else ""
    if drawing and not as_json:
        print(drawing + "\n")
    shown = result | ({"ascii": drawing} if drawing else {})
    _print(as_json, shown, lambda: simulation_tables(loaded, result))


@app.command()
def train(
    plan: PlanFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Run directory to write.")],
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Processes; must be what the plan needs, as by default."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew instead of going on from checkpoints in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a plan on this machine, one process per rank."""
    from eeplan.runtime.preflight import check_training, run_ranks
    from eeplan.views import record_table

    with _work() as progress:
        checked = check_training(plan, out, nproc)
        with progress.step("train", announce=True):
            run_ranks(plan, checked, out, progress, restart=restart)
    result = {"out": str(out), "measured": _read_json(out / "measured.json")}
    _print(as_json, result, lambda: (record_table("trained", result),))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory that training left.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Folder for the report.")],
    compare_plan: Annotated[
        Path | None,
        typer.Option(
            "--compare-plan",
            metavar="PLAN",
            help="Another plan of the model; else what the usage measured in DIR would change.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare what was predicted and what was measured."""
    from eeplan.report.build import write_report
    from eeplan.views import summary_tables

    with _work() as progress, progress.step("write the report"):
        summary = write_report(run_dir, output, compare_plan)
    _print(as_json, summary, lambda: summary_tables(summary, output / "index.html"))


@data_app.command("build")
def data_build(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Text or .jsonl files.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PREFIX", help="Path of the results, without endings.")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="'byte', 'bpe' to train one, or a tokenizer file.")
    ] = "bpe",
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Vocabulary of a new BPE tokenizer (4096).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenize text and jsonl files into Megatron's indexed dataset."""
    from eeplan.runtime.preflight import require_runtime
    from eeplan.views import record_table

    with _work() as progress:
        require_runtime()
        from eeplan.runtime.data import build_command

        with progress.step("build data"):
            built = build_command(inputs, output, tokenizer, vocab_size, progress=progress.update)
    result = {"data_path": str(output), "tokenizer": f"{output}.tokenizer.json"} | built.model_dump(
        mode="json"
    )
    _print(as_json, result, lambda: (record_table("data", result),))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine and the installation."""
    from eeplan.doctor import examine
    from eeplan.views import doctor_table

    with _work() as progress:
        result = examine(progress)
    _print(as_json, result, lambda: (doctor_table(result["checks"]),))
    if not result["ok"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for everything the demo makes.")],
    as_json: Json = False,
) -> None:
    """Do all of it on real text, in a few minutes."""
    from eeplan.demo import run_demo
    from eeplan.views import summary_tables

    with _work() as progress:
        result = run_demo(out, progress=progress)
    _print(as_json, result, lambda: summary_tables(result, out / "index.html"))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
