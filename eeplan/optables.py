"""Per-layer op tables of others become an op profile, so that a GPU cluster can be planned from a laptop.

A table gives seconds of forward, backward and update for every layer of one model on one device, for some
(micro batch, tensor parallel) pairs, and perhaps bytes. Three forms are read:

    JSON, one model       {"op_times_s": {"mb1_tp2": [[f, b, u], …]},
                           "layer_memory_per_sequence_bytes": {"tp2": {…}}}
    JSON, several models  {"profiles": {"MODEL/GPU": {"mb1_tp2": …}}, "layer_memory": {"MODEL": {"tp2": {…}}}}
    CSV                   micro_batch_size,tensor_parallel,layer,forward_s,backward_s[,update_s,
                          kept_bytes,params_bytes]

The first entry of a list is the input embedding, the last the output head with its loss, those between are
the transformer layers; a final norm with an entry of its own counts to the head. Bytes are per sequence: what
a layer keeps for its backward (``act_mem_bytes``), and its fp32 parameters (``params_bytes``). This module
only reads; ``optable_profile`` makes the profile.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, FiniteFloat

from eeplan.errors import FileError, SchemaError
from eeplan.files import read_bytes
from eeplan.schema import Model, validate

Seconds = Annotated[FiniteFloat, Field(ge=0.0)]
Bytes = Annotated[int, Field(ge=0)]
_SIZE = re.compile(r"mb([1-9][0-9]*)_tp([1-9][0-9]*)\Z")
_TENSOR_PARALLEL = re.compile(r"tp([1-9][0-9]*)\Z")

NORM_SHARE = 0.01
"""A norm has 2 h parameters at most, a layer 12 h^2 or so."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer for one microbatch; the update is per iteration."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer on one tensor-parallel rank."""

    params_bytes: int
    """fp32 parameters."""
    kept_bytes: int
    """Kept for the backward, for one sequence."""


@dataclass(frozen=True, slots=True)
class OpTable:
    """One model on one device."""

    name: str
    source: str
    """Where the numbers come from and under which licence, as the file says."""
    times: Mapping[tuple[int, int], tuple[LayerTimes, ...]]
    """By (micro batch size, tensor parallel size): embedding, layers, head."""
    bytes: Mapping[int, tuple[LayerBytes, ...]]
    """By tensor parallel size; empty when the table has none."""

    @property
    def num_layers(self) -> int:
        """Transformer layers: entries without embedding and head."""
        return len(next(iter(self.times.values()))) - 2

    def micro_batch_sizes(self, tensor_parallel: int) -> list[int]:
        """Microbatch sizes measured with that tensor parallel size, ascending."""
        return sorted(mb for mb, tp in self.times if tp == tensor_parallel)


class _Loose(Model):
    """Tables carry more than what is read here."""

    model_config = ConfigDict(extra="ignore")


class _Memory(_Loose):
    params_bytes: tuple[Bytes, ...]
    act_mem_bytes: tuple[Bytes, ...]


class _OneModel(_Loose):
    note: str = ""
    model: str = ""
    gpu: str = ""
    op_times_s: dict[str, tuple[tuple[Seconds, Seconds, Seconds], ...]]
    layer_memory_per_sequence_bytes: dict[str, _Memory] = Field(default_factory=dict)


class _Collection(_Loose):
    note: str = ""
    profiles: dict[str, dict[str, tuple[tuple[Seconds, Seconds, Seconds], ...]]]
    layer_memory: dict[str, dict[str, _Memory]] = Field(default_factory=dict)


def read_op_table(path: Path, name: str | None = None) -> OpTable:
    """Read a table.

    Args:
        path: JSON or CSV.
        name: which entry of a file with several, ``MODEL/GPU``; unnecessary when there is one.

    Raises:
        FileError, SchemaError: unreadable or not such a table; one line with the key.
    """
    where = f"op table {path}"
    if path.suffix.lower() == ".csv":
        return _with_norm_in_head(_from_csv(path, where))
    document = read_json(path, "op table")
    if "profiles" in document:
        return _with_norm_in_head(_from_collection(validate(document, _Collection, where), name, where))
    return _with_norm_in_head(one_model_table(document, where))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON file with an object at its top.

    Raises:
        FileError, SchemaError.
    """
    where = f"{what} {path}"
    try:
        document = json.loads(read_bytes(path, what))
    except UnicodeDecodeError:
        raise SchemaError(f"{where}: not UTF-8 text; expected a JSON file") from None
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"{where}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{where}: not a sensible JSON file: {error}") from None
    if not isinstance(document, dict):
        raise SchemaError(f"{where}: expected an object at the top level, found a {type(document).__name__}")
    return document


def one_model_table(document: Mapping[str, Any], where: str) -> OpTable:
    """The table inside a parsed JSON file of one model, entry by entry; other keys are left to others.

    Raises:
        SchemaError: naming the key.
    """
    one = validate(document, _OneModel, where)
    name = "/".join(part for part in (one.model, one.gpu) if part) or "table"
    return _checked(name, one.note, one.op_times_s, one.layer_memory_per_sequence_bytes, where)


def _from_collection(collection: _Collection, name: str | None, where: str) -> OpTable:
    names = list(collection.profiles)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in collection.profiles:
        asked = f"no table '{name}'" if name else "several tables"
        raise SchemaError(f"{where}: {asked} in it; choose one with --name: {', '.join(names) or 'none'}")
    memory = collection.layer_memory.get(name.partition("/")[0], {})
    return _checked(name, collection.note, collection.profiles[name], memory, where)


def _checked(
    name: str,
    source: str,
    times: Mapping[str, tuple[tuple[float, float, float], ...]],
    memory: Mapping[str, _Memory],
    where: str,
) -> OpTable:
    parsed = {_size(key, where): tuple(LayerTimes(*entry) for entry in rows) for key, rows in times.items()}
    if not parsed:
        raise SchemaError(f"{where}: no op times; expected keys such as 'mb1_tp1'")
    lengths = {len(rows) for rows in parsed.values()}
    if len(lengths) > 1 or min(lengths) < 3:
        raise SchemaError(
            f"{where}: lists of {', '.join(map(str, sorted(lengths)))} entries; expected the same embedding, "
            "layers and head for every size, at least 3 entries"
        )
    return OpTable(name, source, parsed, _checked_bytes(memory, lengths.pop(), where))


def _with_norm_in_head(table: OpTable) -> OpTable:
    """The same table without a last layer that is only a norm, by its parameters."""
    if not table.bytes or table.num_layers < 2:
        return table
    entries = next(iter(table.bytes.values()))
    if entries[-2].params_bytes > NORM_SHARE * entries[1].params_bytes:
        return table
    times = {
        size: (*rows[:-2], LayerTimes(*map(sum, zip(astuple(rows[-2]), astuple(rows[-1]), strict=True))))
        for size, rows in table.times.items()
    }
    sizes = {
        tp: (*rows[:-2], LayerBytes(*map(sum, zip(astuple(rows[-2]), astuple(rows[-1]), strict=True))))
        for tp, rows in table.bytes.items()
    }
    return replace(table, times=times, bytes=sizes)


def _checked_bytes(
    memory: Mapping[str, _Memory], length: int, where: str
) -> dict[int, tuple[LayerBytes, ...]]:
    parsed = {}
    for key, columns in memory.items():
        match = _TENSOR_PARALLEL.match(key)
        if not match:
            raise SchemaError(f"{where}: layer memory for '{key}'; expected a key such as 'tp1'")
        if {len(columns.params_bytes), len(columns.act_mem_bytes)} != {length}:
            raise SchemaError(
                f"{where}: layer memory for '{key}' has {len(columns.params_bytes)} params_bytes and "
                f"{len(columns.act_mem_bytes)} act_mem_bytes; expected {length} of each, as of the op times"
            )
        rows = zip(columns.params_bytes, columns.act_mem_bytes, strict=True)
        parsed[int(match[1])] = tuple(LayerBytes(*row) for row in rows)
    return parsed


def _size(key: str, where: str) -> tuple[int, int]:
    match = _SIZE.match(key)
    if not match:
        raise SchemaError(f"{where}: op times for '{key}'; expected a key such as 'mb1_tp1'")
    return int(match[1]), int(match[2])


class _Row(_Loose):
    """One line of a CSV table; unknown columns are ignored."""

    micro_batch_size: Annotated[int, Field(gt=0)]
    tensor_parallel: Annotated[int, Field(gt=0)] = 1
    layer: Bytes
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds = 0.0
    kept_bytes: Bytes | None = None
    params_bytes: Bytes | None = None


def _from_csv(path: Path, where: str) -> OpTable:
    try:
        text = read_bytes(path, "op table").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError(f"{where} is not UTF-8 text; save it as UTF-8") from None
    rows: dict[tuple[int, int], dict[int, _Row]] = {}
    for line, record in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        # Cells beyond the header's columns come under the key None.
        cells = {key: _number(value) for key, value in record.items() if key is not None and value}
        row = validate(cells, _Row, f"{where}, line {line}")
        layers = rows.setdefault((row.micro_batch_size, row.tensor_parallel), {})
        if row.layer in layers:
            raise SchemaError(f"{where}, line {line}: layer {row.layer} is given twice for this size")
        layers[row.layer] = row
    return _from_rows({size: _in_order(size, layers, where) for size, layers in rows.items()}, path, where)


def _in_order(size: tuple[int, int], layers: Mapping[int, _Row], where: str) -> list[_Row]:
    missing = sorted(set(range(len(layers))) - set(layers))
    if missing:
        raise SchemaError(
            f"{where}: layer {missing[0]} is missing for micro batch {size[0]}, tensor parallel {size[1]}; "
            "layers count from 0 (the embedding) to the head"
        )
    return [layers[index] for index in range(len(layers))]


def _from_rows(rows: Mapping[tuple[int, int], list[_Row]], path: Path, where: str) -> OpTable:
    times = {
        f"mb{mb}_tp{tp}": tuple((row.forward_s, row.backward_s, row.update_s) for row in layers)
        for (mb, tp), layers in rows.items()
    }
    memory = {}
    for (_, tp), layers in rows.items():
        kept = [row.kept_bytes for row in layers if row.kept_bytes is not None]
        params = [row.params_bytes for row in layers if row.params_bytes is not None]
        if len(kept) == len(params) == len(layers):
            memory[f"tp{tp}"] = _Memory(params_bytes=tuple(params), act_mem_bytes=tuple(kept))
    return _checked(path.stem, f"{path.name}", times, memory, where)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
