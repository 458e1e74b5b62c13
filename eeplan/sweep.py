"""Predict many configurations at once: one row each, the exits of each placed best.

Time and peak memory are those that ``plan`` would predict for the same run, by the same costs and the same
recurrence, without filled bubbles and without the choice's reasons. Configurations share stage costs, so a
sweep judges thousands a second. What is impossible becomes a row with the reason, never an error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from eeplan.errors import EeplanError, FileError
from eeplan.files import write_bytes
from eeplan.profile import OpProfile
from eeplan.schema import validate
from eeplan.spec import RunSpec
from eeplan.sweep_axes import Axis, set_key
from eeplan.sweep_predict import Outcome, Predictor

if TYPE_CHECKING:
    import pandas as pd

PROGRESS_EVERY = 1000
OUTPUTS = (".csv", ".parquet")


def sweep(
    run: RunSpec,
    profile: OpProfile,
    axes: Sequence[Axis],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Every combination of the axes' values.

    Args:
        run: what the axes vary.
        profile: op costs; other microbatch sizes and vocabularies are derived from it, and the rows say so.
        axes: fields of the run and their values; the last one varies fastest.
        progress: called with rows done and their number.

    Returns:
        A row per configuration: the axes' keys, then the fields of :class:`Outcome`. Where ``feasible`` is
        false, ``reason`` says why and times are missing.
    """
    import pandas as pd

    predictor, runs = Predictor(profile), _Runs(run, axes)
    combinations = list(product(*(axis.values for axis in axes)))
    records: list[tuple[Any, ...]] = []
    for number, values in enumerate(combinations, start=1):
        records.append((*map(_cell, values), *_row(predictor, runs, values)))
        if number % PROGRESS_EVERY == 0:
            progress(number, len(combinations))
    columns = [*(axis.key for axis in axes), *OUTCOME_FIELDS]
    return pd.DataFrame.from_records(records, columns=columns)


OUTCOME_FIELDS = tuple(field.name for field in fields(Outcome))
_OUTCOME_VALUES = attrgetter(*OUTCOME_FIELDS)


def summary(table: pd.DataFrame, axes: Sequence[Axis]) -> dict[str, Any]:
    """Numbers of a sweep, and its fastest and smallest rows."""
    feasible = table[table["feasible"]]
    reasons = table.loc[~table["feasible"], "reason"].str.split(":").str[0].value_counts()
    result: dict[str, Any] = {
        "configurations": len(table),
        "feasible": len(feasible),
        "axes": {axis.key: len(axis.values) for axis in axes},
        "infeasible": {str(reason): int(count) for reason, count in reasons.items()},
    }
    for name, column in (("fastest", "tokens_per_s"), ("smallest", "peak_bytes")):
        if len(feasible):
            at = feasible[column].idxmax() if name == "fastest" else feasible[column].idxmin()
            # By way of JSON, numpy's numbers become Python's.
            result[name] = json.loads(feasible.loc[[at]].to_json(orient="records"))[0]
    return result


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write CSV or Parquet, by the file's ending.

    Raises:
        FileError: another ending, Parquet without pyarrow, or not writable.
    """
    require_table_name(path)
    if path.suffix == ".csv":
        write_bytes(path, table.to_csv(index=False).encode())
        return
    write_bytes(path, table.to_parquet(index=False))


def require_table_name(path: Path) -> None:
    """Whether a table can be written under that name, found out before the work.

    Raises:
        FileError.
    """
    if path.suffix not in OUTPUTS:
        raise FileError(f"table {path}: unknown ending '{path.suffix}'; expected {' or '.join(OUTPUTS)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise FileError(
            f"table {path}: Parquet needs pyarrow; pip install 'eeplan[parquet]', or write a .csv"
        )


def _row(predictor: Predictor, runs: _Runs, values: Sequence[Any]) -> tuple[Any, ...]:
    try:
        outcome = predictor.predict(runs.run(values))
    except EeplanError as error:
        outcome = Outcome(feasible=False, reason=str(error))
    return _OUTCOME_VALUES(outcome)


class _Runs:
    """Runs for combinations of values. Sections of the run file that repeat are validated once and shared."""

    def __init__(self, run: RunSpec, axes: Sequence[Axis]) -> None:
        self._document = run.model_dump(mode="json")
        self._axes = axes
        self._fixed = {name: getattr(run, name) for name in RunSpec.model_fields}
        self._by_section: dict[str, list[int]] = {}
        for index, axis in enumerate(axes):
            self._by_section.setdefault(axis.key.partition(".")[0], []).append(index)
        self._known: dict[tuple[str, Any], Any] = {}

    def run(self, values: Sequence[Any]) -> RunSpec:
        """The run with the axes at ``values``.

        Raises:
            SchemaError: it is impossible.
        """
        sections = dict(self._fixed)
        try:
            for name, indices in self._by_section.items():
                sections[name] = self._section(name, tuple(values[index] for index in indices), indices)
            return RunSpec(**sections)
        except ValidationError:
            # Again from the whole document, for the message that a run file would get.
            document = copy.deepcopy(self._document)
            for axis, value in zip(self._axes, values, strict=True):
                set_key(document, axis.key, value)
            return validate(document, RunSpec, "run")

    def _section(self, name: str, values: tuple[Any, ...], indices: Sequence[int]) -> Any:
        key = name, values if all(map(_is_plain, values)) else json.dumps(values)
        if key not in self._known:
            document = copy.deepcopy(self._document)
            for index, value in zip(indices, values, strict=True):
                set_key(document, self._axes[index].key, value)
            schema: Any = RunSpec.model_fields[name].annotation
            self._known[key] = TypeAdapter(schema).validate_json(json.dumps(document[name]), strict=True)
        return self._known[key]


def _is_plain(value: Any) -> bool:
    # 1 and True are equal as keys, and not the same to a schema.
    return isinstance(value, str) or type(value) in (int, float)


def _cell(value: Any) -> Any:
    """Lists and mappings as text, which every table can hold."""
    return json.dumps(value) if isinstance(value, list | dict) else value
