"""What a sweep varies: ``--set key=values``, where values are listed or ranged.

exits.count=0..4                    0, 1, 2, 3, 4
training.global_batch_size=64..512:64
exits.head=norm,mlp
parallel.layer_split=[4,4],[3,5]    values are written as in a run file
fill.policy.warmup=0..3             a part of a choice that the run file leaves out
num_microbatches=8..128:8           M: global_batch_size follows from it and the rest of the run
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import prod
from typing import Any

from eeplan.errors import SchemaError, SpecError
from eeplan.schema import parse_yaml
from eeplan.spec import RunSpec

MOST_CONFIGURATIONS = 5_000_000
MICROBATCHES = "num_microbatches"
"""Key of the one axis that is no field of a run file."""
_PARTS_OF_CHOICES = ("fill.policy.warmup", "fill.policy.cooldown")
"""Keys that exist only once a word such as ``none`` is replaced by a mapping."""
_RANGE = re.compile(r"\s*([-+0-9.eE]+?)\.\.([-+0-9.eE]+)(?::([-+0-9.eE]+))?\s*\Z")


@dataclass(frozen=True, slots=True)
class Axis:
    """One field of the run file and the values it takes."""

    key: str
    values: tuple[Any, ...]


def parse_axes(settings: Sequence[str], run: RunSpec) -> tuple[Axis, ...]:
    """Read ``key=values`` texts.

    Args:
        run: whose fields they name.

    Raises:
        SpecError: unknown or repeated key, no values, or too many configurations.
    """
    axes = tuple(_axis(text, run) for text in settings)
    keys = [axis.key for axis in axes]
    if MICROBATCHES in keys and "training.global_batch_size" in keys:
        raise SpecError(
            f"--set {MICROBATCHES} and --set training.global_batch_size say the same twice; drop one"
        )
    for key in keys:
        if keys.count(key) > 1:
            raise SpecError(f"--set {key} is given twice; list all its values in one")
    count = prod(len(axis.values) for axis in axes)
    if count > MOST_CONFIGURATIONS:
        raise SpecError(f"{count:,} configurations; a sweep takes {MOST_CONFIGURATIONS:,} at most, vary less")
    return axes


def set_key(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a dumped run; a word that stands for a mapping gives way to it."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(document[parent], dict):
            document[parent] = {}
        document = document[parent]
    document[last] = value


def _axis(text: str, run: RunSpec) -> Axis:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not values.strip():
        raise SpecError(f"--set {text!r}: expected key=value,value or key=first..last:step")
    if key in (MICROBATCHES, *_PARTS_OF_CHOICES):
        return Axis(key, tuple(_values(key, values)))
    node: Any = run.model_dump(mode="json")
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            raise SpecError(f"--set {key}: no such key in a run file")
        node = node[part]
    return Axis(key, tuple(_values(key, values)))


def _values(key: str, text: str) -> list[Any]:
    values: list[Any] = []
    for item in _items(text):
        ranged = _RANGE.match(item)
        if ranged:
            values += _range(key, *ranged.groups())
        else:
            try:
                # As a run file is read, so that 1e-3 is a number here, too.
                values += parse_yaml(f"values: [{item}]".encode(), key)["values"]
            except SchemaError:
                raise SpecError(f"--set {key}: {item!r} is no value of a run file") from None
    if not values:
        raise SpecError(f"--set {key}: no values")
    return values


def _items(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    items, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth <= 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]]


def _range(key: str, first: str, last: str, step: str | None) -> list[int | float]:
    """Both ends included, in decimal arithmetic, so that 0..0.3:0.1 ends with 0.3."""
    try:
        low, high, by = Decimal(first), Decimal(last), Decimal(step or "1")
    except InvalidOperation:
        raise SpecError(f"--set {key}: {first}..{last} is no range of numbers") from None
    if not (low.is_finite() and high.is_finite() and by.is_finite()) or by <= 0 or high < low:
        raise SpecError(
            f"--set {key}: {first}..{last}:{step or 1} is empty; expected first <= last, step > 0"
        )
    count = int((high - low) / by) + 1
    if count > MOST_CONFIGURATIONS:
        raise SpecError(f"--set {key}: {count:,} values; a sweep takes {MOST_CONFIGURATIONS:,} at most")
    whole = all(number == number.to_integral_value() for number in (low, by))
    numbers = (low + index * by for index in range(count))
    return [int(number) if whole else float(number) for number in numbers]
