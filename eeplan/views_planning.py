"""Tables for people of what ``cli_planning`` computes; see ``views``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eeplan.views import Table, record_table

if TYPE_CHECKING:
    from eeplan.profile import OpProfile
    from eeplan.spec import RunSpec


def paper_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Of ``validate.paper.validate_paper``: cells, errors, constants with their sources."""
    cells = tuple(
        (
            cell["model"],
            cell["setup"],
            f"{cell['predicted_s']:.2f}",
            f"{cell['measured_s']:.2f}",
            _percent(cell["time_error"]),
            f"{cell['predicted_gb']:.2f}",
            f"{cell['measured_gb']:.2f}",
            _percent(cell["memory_error"]),
        )
        for cell in result["cells"]
    )
    order = tuple(
        (model, *("as measured" if right[quantity] else "not as measured" for quantity in ("time", "memory")))
        for model, right in result["order"].items()
    )
    sensitivity = tuple(
        (
            f"{other['logit_temporary_bytes']:g}",
            f"{other['bandwidth_share']:g}",
            _percent(other["time"]["max_abs"]),
            _percent(other["memory"]["max_abs"]),
            "yes" if all(all(right.values()) for right in other["order"].values()) else "no",
        )
        for other in result["sensitivity"]
    )
    return (
        Table(
            "EE-LLM's ablation, predicted from its rows without exits",
            cells,
            ("model", "set-up", "s", "measured", "error", "GB", "measured", "error"),
        ),
        _errors(result, ("time", "memory")),
        Table("order of the set-ups", order, ("model", "time", "memory")),
        Table(
            "other assumptions",
            sensitivity,
            (
                "bytes per logit",
                "bandwidth share",
                "largest time error",
                "largest memory error",
                "order right",
            ),
        ),
        _constants(result["constants"]),
    )


def sailor_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Of ``validate.sailor.validate_sailor``: runs, errors, constants with their sources."""
    runs = tuple(
        (
            run["name"],
            str(run["pipeline_parallel"]),
            str(run["data_parallel"]),
            str(run["micro_batch_size"]),
            str(run["num_microbatches"]),
            f"{run['predicted_s']:.4f}",
            f"{run['measured_s']:.4f}",
            _percent(run["time_error"]),
            _percent(run["calibrated_time_error"]),
            _percent(run["memory_error"]),
        )
        for run in result["runs"]
    )
    flat = {
        "time, raw": result["raw"]["time"],
        "time, op times only": result["op_times_only"]["time"],
        "time, calibrated": result["calibrated"]["time"],
        "time, calibrated with links": result["calibrated_with_links"]["time"],
        "memory, raw": result["raw"]["memory"],
    }
    columns = ("run", "P", "D", "mb", "M", "predicted s", "measured s", "error", "calibrated", "memory")
    return (
        Table("measured runs, predicted from their op times", runs, columns),
        _errors(flat, tuple(flat)),
        _constants(result["constants"]),
    )


def script_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Of ``flags read``: what was not understood, and what was assumed."""
    unread = tuple((" ".join([one["flag"], *one["values"]]), one["why"]) for one in result["not_understood"])
    return (
        Table(f"run file {result['run']}", (("written", ""),)),
        Table("not understood", unread or (("nothing", ""),)),
        Table("assumed", tuple((text, "") for text in result["assumed"]) or (("nothing", ""),)),
    )


def sweep_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Of ``sweep``: numbers, reasons, the fastest and the smallest row."""
    plain = {key: result[key] for key in ("table", "configurations", "feasible")}
    tables = [record_table("sweep", plain)]
    if result["infeasible"]:
        rows = tuple((reason, f"{count:,}") for reason, count in result["infeasible"].items())
        tables.append(Table("infeasible", rows))
    for name in ("fastest", "smallest"):
        if name in result:
            shown = {key: value for key, value in result[name].items() if value not in (None, "")}
            tables.append(record_table(name, shown))
    if "figures" in result:
        tables.append(Table("figures", tuple((path,) for path in result["figures"])))
    return tuple(tables)


def sweep_caption(run: RunSpec, profile: OpProfile) -> str:
    """Device and batch, for the foot of a figure."""
    training = run.training
    return (
        f"predicted for {profile.device.name}, microbatches of {training.micro_batch_size} x "
        f"{training.seq_length} tokens unless varied; axes not shown at their best"
    )


def _errors(summaries: Mapping[str, Any], names: Sequence[str]) -> Table:
    rows = tuple(
        (
            name,
            str(summaries[name]["n"]),
            _percent(summaries[name]["mean_abs"], signed=False),
            _percent(summaries[name]["max_abs"], signed=False),
            _percent(summaries[name]["mean"]),
        )
        for name in names
    )
    return Table("errors", rows, ("", "n", "mean", "largest", "signed mean"))


def _constants(constants: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (one["name"], one["value"] if isinstance(one["value"], str) else f"{one['value']:.6g}", one["source"])
        for one in constants
    )
    return Table("constants", rows, ("name", "value", "source"))


def _percent(fraction: float | None, signed: bool = True) -> str:
    if fraction is None:
        return "-"
    return f"{100 * fraction:{'+' if signed else ''}.2f} %"
