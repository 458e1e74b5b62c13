"""Commands for planning on other people's clusters: validate, import-ops, flags, sweep, pareto.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eeplan.cli_output import Json, PlanFile, RunFile, print_json, print_result, work

app = typer.Typer(rich_markup_mode=None)
validate_app = typer.Typer(rich_markup_mode=None, help="Compare predictions with what others measured.")
flags_app = typer.Typer(rich_markup_mode=None, help="Write and read Megatron-LM's command lines.")
app.add_typer(validate_app, name="validate")
app.add_typer(flags_app, name="flags")

LinkBandwidth = Annotated[
    float, typer.Option("--link-bandwidth", min=1.0, metavar="BYTES/S", help="Of a link between ranks.")
]
LinkLatency = Annotated[
    float, typer.Option("--link-latency", min=0.0, metavar="SECONDS", help="Of a message on it.")
]


@validate_app.command("paper")
def validate_paper(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Another table of the same form (JSON).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the ablation of EE-LLM's two optimizations from its rows without exits."""
    from eeplan.validate.paper import validate_paper as run_validation
    from eeplan.views_planning import paper_tables

    with work():
        result = run_validation(data)
    print_result(as_json, result, lambda: paper_tables(result))


@validate_app.command("sailor")
def validate_sailor(
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help="Measured runs with their op times (JSON).")
    ],
    link_bandwidth: LinkBandwidth = 25e9,
    link_latency: LinkLatency = 20e-6,
    base_bytes: Annotated[
        int, typer.Option("--base-bytes", min=0, help="Device memory outside the framework's allocator.")
    ] = 4_760_000_000,
    as_json: Json = False,
) -> None:
    """Predict measured training runs from the op times of their layers."""
    from eeplan.profile import Transfer
    from eeplan.validate.sailor import validate_sailor as run_validation
    from eeplan.views_planning import sailor_tables

    with work():
        link = Transfer(latency_s=link_latency, bandwidth_bytes_per_s=link_bandwidth)
        result = run_validation(data, link, base_bytes)
    print_result(as_json, result, lambda: sailor_tables(result))


@app.command("import-ops")
def import_ops(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Op times per layer (JSON or CSV).")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROFILE", help="Profile to write.")],
    run: Annotated[Path, typer.Option("--run", metavar="RUN", help="Run file of the table's model.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Which table of a file with several: MODEL/GPU.")
    ] = None,
    device_name: Annotated[str | None, typer.Option("--device-name", help="Of the GPU.")] = None,
    device_memory: Annotated[
        int, typer.Option("--device-memory", min=1, metavar="BYTES", help="Of the GPU.")
    ] = 80_000_000_000,
    link_bandwidth: LinkBandwidth = 25e9,
    link_latency: LinkLatency = 20e-6,
    node_link_bandwidth: Annotated[
        float | None,
        typer.Option("--node-link-bandwidth", min=1.0, metavar="BYTES/S", help="Between nodes."),
    ] = None,
    node_link_latency: Annotated[
        float, typer.Option("--node-link-latency", min=0.0, metavar="SECONDS", help="Of a message on it.")
    ] = 20e-6,
    base_bytes: Annotated[
        int | None,
        typer.Option("--base-bytes", min=0, help="Device memory outside the framework's allocator."),
    ] = None,
    date: Annotated[str, typer.Option("--date", help="When the table was measured.")] = "not stated",
    as_json: Json = False,
) -> None:
    """Turn a table of op times into a profile to plan with."""
    from eeplan.files import require_writable_file
    from eeplan.optable_profile import Cluster, profile_from_table
    from eeplan.optables import read_op_table
    from eeplan.profile import Transfer
    from eeplan.schema import write_yaml
    from eeplan.spec import load_run
    from eeplan.views import profile_tables

    with work():
        spec, _ = load_run(run)
        read = read_op_table(table, name)
        link = Transfer(latency_s=link_latency, bandwidth_bytes_per_s=link_bandwidth)
        between = None
        if node_link_bandwidth is not None:
            between = Transfer(latency_s=node_link_latency, bandwidth_bytes_per_s=node_link_bandwidth)
        cluster = Cluster(device_name or read.name, device_memory, link, link, base_bytes, between)
        made = profile_from_table(read, spec, cluster, date)
        require_writable_file(output, "profile")
        write_yaml(output, made, "Imported by `eeplan import-ops`; source and licence under software.source.")
    result = {"profile": str(output)} | made.model_dump(mode="json")
    print_result(as_json, result, lambda: profile_tables(made))


@flags_app.command("emit")
def flags_emit(
    plan: PlanFile,
    trainer: Annotated[
        Literal["megatron", "ee-llm"] | None,
        typer.Option("--for", help="Whose flags; by default EE-LLM's for a plan with exits."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="SCRIPT", help="Launch script to write.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the Megatron-LM command line that equals a plan."""
    from eeplan.files import require_writable_file, write_text
    from eeplan.megatron_flags import Trainer, flags_of_plan
    from eeplan.plan import load_plan

    with work():
        flags = flags_of_plan(load_plan(plan))
        wanted: Trainer = trainer or ("ee-llm" if flags.exits else "megatron")
        script = flags.script(wanted)
        if output:
            require_writable_file(output, "script")
            write_text(output, script)
    if as_json:
        result: dict[str, Any] = {"for": wanted, "words": list(flags.words(wanted)), "script": script}
        result |= {part: list(getattr(flags, part)) for part in ("launcher", "megatron", "layout", "exits")}
        print_json(result | {"notes": list(flags.notes)})
        return
    for note in flags.notes:
        print(f"eeplan: not said by these flags: {note}", file=sys.stderr)
    if not output:
        print(script, end="")


@flags_app.command("read")
def flags_read(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Launch script, or its flags alone.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Run file to write.")],
    define: Annotated[
        list[str] | None,
        typer.Option("--define", metavar="NAME=VALUE", help="Of a variable the script does not set."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Where the script does not say it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a Megatron-LM or EE-LLM launch script into a run file."""
    from eeplan.errors import SpecError
    from eeplan.files import read_bytes, require_writable_file
    from eeplan.megatron_reader import read_script
    from eeplan.schema import write_yaml
    from eeplan.views_planning import script_tables

    with work():
        pairs = [text.partition("=") for text in define or ()]
        for name, equals, _ in pairs:
            if not (name and equals):
                raise SpecError(f"--define {name}: expected NAME=VALUE")
        text = read_bytes(script, "script").decode(errors="replace")
        defined = {name: value for name, _, value in pairs}
        read = read_script(text, f"script {script}", defined, vocab_size)
        require_writable_file(output, "run file")
        write_yaml(output, read.run, f"Read from {script.name} by `eeplan flags read`.")
    result = {
        "run": str(output),
        "run_file": read.run.model_dump(mode="json"),
        "not_understood": [
            {"flag": one.flag, "values": list(one.values), "why": one.why} for one in read.not_understood
        ],
        "assumed": list(read.assumed),
    }
    print_result(as_json, result, lambda: script_tables(result))


@app.command("sweep")
def sweep(
    run: RunFile,
    profile: Annotated[Path, typer.Option("--profile", help="Measured op costs (profile.yaml).")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="TABLE", help="Table to write, .csv or .parquet.")
    ],
    setting: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUES", help="Field of the run and its values: 1,2 or 1..9:2."),
    ],
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Folder for a figure per axis.")
    ] = None,
    usage: Annotated[
        Path | None,
        typer.Option("--usage", help="How often tokens leave early (usage.yaml); else each run's prior."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict time, memory and decoding of every combination of settings."""
    from eeplan.files import require_writable_file, require_writable_folder
    from eeplan.profile import load_profile
    from eeplan.spec import load_run
    from eeplan.sweep import require_table_name, summary, write_table
    from eeplan.sweep import sweep as run_sweep
    from eeplan.sweep_axes import parse_axes
    from eeplan.usage import load_usage
    from eeplan.views_planning import sweep_caption, sweep_tables

    with work() as progress:
        spec, _ = load_run(run)
        costs, _ = load_profile(profile)
        axes = parse_axes(setting, spec)
        require_table_name(output)
        require_writable_file(output, "table")
        if figures:
            require_writable_folder(figures, "folder of figures")
        used = load_usage(usage)[0].content if usage else None
        with progress.step("predict"):
            table = run_sweep(spec, costs, axes, progress.update, used)
        write_table(table, output)
        result = {"table": str(output)} | summary(table, axes)
        if figures:
            from eeplan.sweep_figures import write_figures

            written = write_figures(table, axes, figures, sweep_caption(spec, costs))
            result["figures"] = [str(path) for path in written]
    print_result(as_json, result, lambda: sweep_tables(result))


@app.command("pareto")
def pareto(
    run: RunFile,
    profile: Annotated[Path, typer.Option("--profile", help="Measured op costs (profile.yaml).")],
    usage: Annotated[
        Path | None,
        typer.Option("--usage", help="How often tokens leave early (usage.yaml); else the run's prior."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="TABLE", help="Table to write (.csv).")
    ] = None,
    pick: Annotated[
        int | None, typer.Option("--pick", min=1, help="Point to plan, by its number in the table.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Where to write the plan of that point.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Weigh training time, memory and decode latency: every choice that no other beats in all three."""
    from eeplan.errors import SpecError
    from eeplan.files import require_writable_file, write_text
    from eeplan.pareto_views import csv_text, front_result, front_tables
    from eeplan.plan import write_plan
    from eeplan.profile import load_profile
    from eeplan.sim.pareto import pareto_front
    from eeplan.sim.planner import make_plan
    from eeplan.spec import load_run, replace_keys
    from eeplan.usage import load_usage

    with work():
        if (pick is None) != (plan is None):
            raise SpecError("--pick and --plan belong together: which point, and where its plan goes")
        spec, run_sha256 = load_run(run)
        costs, profile_sha256 = load_profile(profile)
        used = load_usage(usage) if usage else (None, None)
        for path, what in ((output, "table"), (plan, "plan")):
            if path:
                require_writable_file(path, what)
        front = pareto_front(spec, costs, used[0].content if used[0] else spec.decode.prior)
        result = front_result(front)
        if pick is not None and plan is not None:
            if pick > len(front.points):
                raise SpecError(f"--pick {pick}: the front has {len(front.points)} points")
            chosen = replace_keys(spec, dict(front.points[pick - 1].keys))
            write_plan(plan, make_plan(chosen, run_sha256, costs, profile_sha256, *used))
            result |= {"picked": pick, "plan": str(plan)}
        if output:
            write_text(output, csv_text(result))
            result |= {"table": str(output)}
    print_result(as_json, result, lambda: front_tables(result))
