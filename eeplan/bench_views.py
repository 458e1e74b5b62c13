"""Results of ``eeplan bench`` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eeplan.report import words
from eeplan.views import Table, plain_text


def train_bench_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """One line for each number of stages: both executors, and exits as measured and predicted."""
    rows = []
    for case in result["cases"]:
        overhead = case["exit_overhead"]
        cells = (
            str(case["p"]),
            str(case["m"]),
            words.seconds(case["own_s"]),
            words.seconds(case["stock_s"]),
            f"{case['ratio_to_stock']:.3f}",
            words.percent(overhead["measured"]),
            words.percent(overhead["predicted"]),
        )
        rows.append(tuple(map(plain_text, cells)))
    columns = ("stages", "M", "eeplan", "megatron-core", "ratio", "exits cost", "predicted")
    title = f"one iteration without optimizer, median; ratio of paired runs {result['ratio_to_stock']:.3f}"
    return (Table(title, tuple(rows), columns),)


def decode_bench_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """One line for each run, then the ratios."""
    rows = tuple(tuple(map(plain_text, _decode_cells(run))) for run in result["runs"])
    columns = (
        "mode",
        "batch",
        "threshold",
        "tokens/s",
        "predicted",
        "layers",
        "as full",
        "first token",
        "p99",
    )
    hardware = result["hardware"]
    title = (
        f"decoding on {hardware['device']['name']}, {words.plural(hardware['threads'], 'thread')}, "
        f"{hardware['dtype']}; median of {words.plural(result['setting']['rounds'], 'round')}"
    )
    ratios = tuple(
        (name, "not measured" if value is None else plain_text(_ratio(name, value)))
        for name, value in result["ratios"].items()
    )
    at = _threshold(result["ratios_threshold"]["threshold"])
    return (
        Table(title, rows, columns),
        Table(f"paired, batch 1, threshold {at} ({result['ratios_threshold']['origin']})", ratios),
    )


def _decode_cells(run: Mapping[str, Any]) -> tuple[str, ...]:
    predicted, layers, agreement = (
        run[key] for key in ("predicted_tokens_per_s", "mean_layers", "agreement_with_full")
    )
    return (
        run["mode"],
        str(run["batch"]),
        _threshold(run["threshold"]),
        words.number(run["tokens_per_s"]),
        words.MISSING if predicted is None else words.number(predicted),
        words.MISSING if layers is None else f"{layers:.2f}",
        words.MISSING if agreement is None else words.percent(agreement),
        words.seconds(run["time_to_first_token_s"]),
        words.seconds(run["latency_s"]["p99"]),
    )


def _threshold(threshold: float | Sequence[float]) -> str:
    values = (threshold,) if isinstance(threshold, int | float) else threshold
    return ", ".join(f"{value:g}" for value in values)


def _ratio(name: str, value: float) -> str:
    return words.percent(value) if name == "framework_overhead" else f"{value:.3f}"
