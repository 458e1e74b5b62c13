"""Speed of the decoding modes: measured beside predicted, and against agreement with the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from eeplan.files import require_writable_folder, write_bytes
from eeplan.report.palette import INK, MUTED, exit_colours
from eeplan.report.style import (
    house_style,
    legend_above,
    measured_fill,
    new_figure,
    png,
    predicted_fill,
)

_MODES = ("catch_up", "kv_recompute", "self_speculative", "pipeline", "full")


def write_figures(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Draw ``speed.png`` and ``trade.png`` from what ``eeplan bench decode --json`` prints.

    Raises:
        FileError: the folder cannot be written.
    """
    require_writable_folder(folder, "figure folder")
    drawn = {"speed.png": speed_figure(result), "trade.png": trade_figure(result)}
    for name, figure in drawn.items():
        write_bytes(folder / name, png(figure))
    return [folder / name for name in drawn]


def speed_figure(result: Mapping[str, Any]) -> Figure:
    """Tokens/s of every run, predicted above measured where there is a prediction, by batch size."""
    batches = list(dict.fromkeys(run["batch"] for run in result["runs"]))
    most = max(sum(run["batch"] == batch for run in result["runs"]) for batch in batches)
    with house_style():
        figure = new_figure(10.8, 1.2 + 0.3 * most, "Decoding speed", caption_of(result))
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for axes, batch in zip(panels, batches, strict=True):
            runs = [run for run in result["runs"] if run["batch"] == batch]
            for row, run in enumerate(runs):
                colour = mode_colour(run["mode"])
                predicted = run["predicted_tokens_per_s"]
                if predicted is not None:
                    axes.barh(row - 0.2, predicted, 0.36, **predicted_fill(colour))
                axes.barh(row + 0.2, run["tokens_per_s"], 0.36, **measured_fill(colour))
            axes.set_yticks(range(len(runs)), [_name(run) for run in runs], fontsize=7)
            axes.invert_yaxis()
            axes.set_xlabel(f"tokens/s, batch {batch}")
            axes.grid(axis="x")
        fills = {"predicted": predicted_fill(MUTED), "measured": measured_fill(MUTED)}
        legend_above(panels[0], [Patch(label=name, **fill) for name, fill in fills.items()])
    return figure


def trade_figure(result: Mapping[str, Any]) -> Figure:
    """Speed-up over ``full`` at batch 1 against agreement with the full model, a line for each mode."""
    runs = [run for run in result["runs"] if run["batch"] == 1 and run["agreement_with_full"] is not None]
    full = next(run["tokens_per_s"] for run in runs if run["mode"] == "full")
    with house_style():
        figure = new_figure(6.4, 3.8, "Speed-up and agreement with the full model", caption_of(result))
        axes = figure.add_subplot()
        for mode in dict.fromkeys(run["mode"] for run in runs):
            mine = sorted(
                (run for run in runs if run["mode"] == mode), key=lambda run: -_number(run["threshold"])
            )
            axes.plot(
                [100 * run["agreement_with_full"] for run in mine],
                [run["tokens_per_s"] / full for run in mine],
                marker="o", markersize=4.5, linewidth=1.1, color=mode_colour(mode), label=mode,
            )  # fmt: skip
            for run in mine if mode in ("catch_up", "pipeline") else []:
                axes.annotate(
                    f"{_number(run['threshold']):g}",
                    (100 * run["agreement_with_full"], run["tokens_per_s"] / full),
                    xytext=(4, 4), textcoords="offset points", fontsize=7, color=MUTED,
                )  # fmt: skip
        axes.axhline(1.0, color=MUTED, linewidth=0.8, zorder=1)
        axes.set_xlabel("tokens that are the full model's after the same text (%)")
        axes.set_ylabel("speed-up over full")
        axes.grid(axis="y")
        axes.legend()
    return figure


def caption_of(result: Mapping[str, Any]) -> str:
    """Model, hardware, threads and rounds."""
    model, hardware, setting = result["model"], result["hardware"], result["setting"]
    return (
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, vocabulary {model['vocab_size']}; "
        f"{hardware['device']['name']}, {hardware['threads']} threads, {hardware['dtype']}; prompts of "
        f"{setting['prompt_tokens']} tokens, {setting['new_tokens']} new; median of {setting['rounds']} "
        "rounds"
    )


def _name(run: Mapping[str, Any]) -> str:
    return (
        run["mode"] if run["mode"] in ("full", "transformers") else f"{run['mode']} {_text(run['threshold'])}"
    )


def _text(threshold: float | Sequence[float]) -> str:
    values = (threshold,) if isinstance(threshold, int | float) else threshold
    return "/".join(f"{value:.2g}" for value in values)


def _number(threshold: float | Sequence[float]) -> float:
    """For ordering: the mean of one for each exit."""
    return threshold if isinstance(threshold, int | float) else sum(threshold) / len(threshold)


def mode_colour(mode: str) -> str:
    """One hue for each mode with early exits."""
    return exit_colours(_MODES).get(mode, INK if mode == "full" else MUTED)
