"""What the three YAML files share: strict frozen models, and errors that say what to do.

Nothing about runs, profiles or plans is known here.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from eeplan.errors import SchemaError
from eeplan.files import read_bytes, sha256_bytes, write_text

_UNION_BRANCH = re.compile(r"\[|^constrained-|^(int|float|str)$")


class Model(BaseModel):
    """Base of every schema: immutable, no unknown keys, no silent conversion of strings to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


ModelT = TypeVar("ModelT", bound=Model)


def load_yaml(path: Path, schema: type[ModelT], what: str) -> tuple[ModelT, str]:
    """Parse and validate a YAML file.

    Args:
        path: file to read.
        schema: pydantic model of its top level.
        what: how to call it in errors ("run file", "profile", "plan").

    Returns:
        The validated model and the SHA-256 of the file's bytes.

    Raises:
        FileError: unreadable. SchemaError: not YAML, or not of this schema; one line with the key path.
    """
    raw = read_bytes(path, what)
    document = parse_yaml(raw, f"{what} {path}")
    return validate(document, schema, f"{what} {path}"), sha256_bytes(raw)


def parse_yaml(raw: bytes, where: str) -> dict[str, Any]:
    """YAML bytes to a mapping, with duplicate keys refused.

    Raises:
        SchemaError: not UTF-8, not YAML, not a mapping at the top, or a key given twice.
    """
    try:
        document = yaml.load(raw.decode(), Loader=_UniqueKeyLoader)
    except UnicodeDecodeError:
        raise SchemaError(f"{where}: not UTF-8 text; expected a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise SchemaError(f"{where}: not valid YAML{at}: {problem}") from None
    except (ValueError, RecursionError) as error:
        # Digits by the thousand, or brackets nested by the thousand.
        raise SchemaError(f"{where}: not a sensible YAML file: {error}") from None
    if not isinstance(document, dict):
        found = "an empty file" if document is None else f"a {type(document).__name__}"
        raise SchemaError(f"{where}: expected a mapping of keys at the top level, found {found}")
    return document


def validate(document: Any, schema: type[ModelT], where: str) -> ModelT:
    """Validate ``document``; the first problem becomes a one-line :class:`SchemaError`."""
    try:
        # JSON mode: YAML's lists become tuples, yet a string never becomes a number.
        return schema.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise SchemaError(f"{where}: {_first_problem(error, schema)}") from None
    except (ValueError, RecursionError):
        raise SchemaError(f"{where}: an anchor contains itself; write the value out") from None


def dump_yaml(model: Model) -> str:
    """YAML text of a model, keys in the order of the schema."""
    return yaml.dump(
        model.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True
    )


def write_yaml(path: Path, model: Model, header: str = "") -> None:
    """Write a model as YAML, whole or not at all; ``header`` becomes a comment on top."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    write_text(path, comment + dump_yaml(model))


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with the same key twice (YAML itself keeps the last one)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a string which :class:`_UniqueKeyLoader` would read as a number."""


# YAML 1.1, which PyYAML follows, takes 1e-4 and 1.5e3 for strings; YAML 1.2 takes them for numbers.
_SHORT_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
for _class in (_UniqueKeyLoader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _SHORT_FLOAT, list("-+.0123456789"))


def _first_problem(error: ValidationError, schema: type[Model]) -> str:
    problems = error.errors(include_url=False)
    # A misspelt key is both unknown and missing; the first says more.
    problem = min(problems, key=lambda one: one["type"] != "extra_forbidden")
    location = _keys_of(problem)
    path = _path_text(location)
    kind = problem["type"]
    # Each branch of a union such as `auto | number` complains for itself; that is one problem.
    branches = [other for other in problems if _keys_of(other) == location]
    more = len({_path_text(_keys_of(other)) for other in problems}) - 1
    tail = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    if kind == "extra_forbidden":
        valid = _valid_keys(schema, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key '{path}'; {hint}{tail}"
    if kind == "missing":
        return f"missing key '{path}'; add it{tail}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in ("value_error", "assertion_error"):
        return f"{path + ': ' if path else ''}{message}{tail}"
    message = " or ".join(
        [message, *(other["msg"].removeprefix("Input should be ") for other in branches[1:])]
    )
    message = message[0].lower() + message[1:]
    return f"key '{path}' has value {_short(problem['input'])}: {message}{tail}"


def _keys_of(problem: ErrorDetails) -> list[int | str]:
    """Where a problem is, without the names that pydantic gives to the branches of a union."""
    return [part for part in problem["loc"] if isinstance(part, int) or not _UNION_BRANCH.search(part)]


def _path_text(location: list[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _valid_keys(schema: type[BaseModel], location: list[int | str]) -> list[str]:
    """Keys that the model at ``location`` below ``schema`` accepts."""
    current: Any = schema
    for part in location:
        models = _models_in(current)
        if isinstance(part, int):
            continue
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        # A union's branch shows up in the location under the branch's own name; stay where we are.
        if fields:
            current = fields[0]
    return sorted({key for model in _models_in(current) for key in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
