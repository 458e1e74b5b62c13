"""Predict many configurations at once: one row each, the exits of each placed best.

Time, peak memory, fills and decode latency are those that ``plan`` would predict for the same run, by the
same costs and the same recurrence, without the choice's reasons. Configurations share stage costs, so a sweep
judges thousands a second; filled bubbles and what the planner has to search for take longer. What is
impossible becomes a row with the reason, never an error.
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
from eeplan.sweep_axes import MICROBATCHES, Axis, set_key
from eeplan.sweep_outcome import Outcome
from eeplan.sweep_predict import Predictor
from eeplan.usage import Usage

if TYPE_CHECKING:
    import pandas as pd

PROGRESS_EVERY = 1000
OUTPUTS = (".csv", ".parquet")


def sweep(
    run: RunSpec,
    profile: OpProfile,
    axes: Sequence[Axis],
    progress: Callable[[int, int], None] = lambda done, total: None,
    usage: Usage | None = None,
) -> pd.DataFrame:
    """Every combination of the axes' values.

    Args:
        run: what the axes vary.
        profile: op costs; other microbatch sizes and vocabularies are derived from it, and the rows say so.
        axes: fields of the run and their values; the last one varies fastest.
        progress: called with rows done and their number.
        usage: how often tokens leave early; None takes each run's ``decode.prior``.

    Returns:
        A row per configuration: the axes' keys, then the fields of :class:`Outcome`. Where ``feasible`` is
        false, ``reason`` says why and times are missing.
    """
    import pandas as pd

    predictor, runs = Predictor(profile, usage), _Runs(run, axes)
    combinations = list(product(*(axis.values for axis in axes)))
    records: list[tuple[Any, ...]] = []
    for number, values in enumerate(combinations, start=1):
        records.append((*map(_cell, values), *_row(predictor, runs, values)))
        if number % PROGRESS_EVERY == 0:
            progress(number, len(combinations))
    columns = [*(axis.key for axis in axes), *OUTCOME_FIELDS]
    table = pd.DataFrame.from_records(records, columns=columns)
    # An axis may be what an outcome says, too.
    return table.loc[:, ~table.columns.duplicated()]


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
        self._microbatches = next((i for i, axis in enumerate(axes) if axis.key == MICROBATCHES), None)
        self._by_section: dict[str, list[int]] = {}
        for index, axis in enumerate(axes):
            # Microbatches come last, since their number means a batch only with the rest of the run.
            if index != self._microbatches:
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
                changes = tuple((self._axes[index].key, values[index]) for index in indices)
                sections[name] = self._section(name, changes)
            if self._microbatches is not None:
                sections["training"] = self._with_microbatches(sections, values)
            run = RunSpec.model_construct(**sections)
            # Its sections are valid each by itself; what must hold between them is checked by these.
            for check in _CHECKS_BETWEEN:
                check(run)
            return run
        except (ValidationError, ValueError):
            # Again from the whole document, for the message that a run file would get.
            return validate(self._changed_document(values), RunSpec, "run")

    def _section(self, name: str, changes: tuple[tuple[str, Any], ...]) -> Any:
        plain = all(_is_plain(value) for _, value in changes)
        key = name, changes if plain else json.dumps(changes)
        if key not in self._known:
            document = {name: copy.deepcopy(self._document[name])}
            for dotted, value in changes:
                set_key(document, dotted, value)
            schema: Any = RunSpec.model_fields[name].annotation
            self._known[key] = TypeAdapter(schema).validate_json(json.dumps(document[name]), strict=True)
        return self._known[key]

    def _with_microbatches(self, sections: dict[str, Any], values: Sequence[Any]) -> Any:
        changes = [(self._axes[index].key, values[index]) for index in self._by_section.get("training", ())]
        size = self._batch_of(values, sections["training"].micro_batch_size, sections["parallel"])
        return self._section("training", (*changes, ("training.global_batch_size", size)))

    def _batch_of(self, values: Sequence[Any], micro_batch_size: int, parallel: Any) -> Any:
        assert self._microbatches is not None, "there is an axis of microbatches"
        wanted = values[self._microbatches]
        if type(wanted) is not int:
            # Not a number: the batch cannot be one either, and its schema says so.
            return wanted
        return wanted * micro_batch_size * parallel.data_parallel_size

    def _changed_document(self, values: Sequence[Any]) -> dict[str, Any]:
        document = copy.deepcopy(self._document)
        for axis, value in zip(self._axes, values, strict=True):
            if axis.key != MICROBATCHES:
                set_key(document, axis.key, value)
        if self._microbatches is not None:
            run = validate(document, RunSpec, "run")
            size = self._batch_of(values, run.training.micro_batch_size, run.parallel)
            set_key(document, "training.global_batch_size", size)
        return document


_CHECKS_BETWEEN: tuple[Callable[[RunSpec], Any], ...] = tuple(
    decorator.func for decorator in RunSpec.__pydantic_decorators__.model_validators.values()
)
"""Validators of the whole run, which pydantic would call after those of its sections."""


def _is_plain(value: Any) -> bool:
    # 1 and True are equal as keys, and not the same to a schema.
    return isinstance(value, str) or type(value) in (int, float)


def _cell(value: Any) -> Any:
    """Lists and mappings as text, which every table can hold."""
    return json.dumps(value) if isinstance(value, list | dict) else value
