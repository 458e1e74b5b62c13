"""Results of ``eeplan bench`` as tables."""

from __future__ import annotations

from collections.abc import Mapping
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
