from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import FileError, SchemaError
from eeplan.files import sha256_bytes
from eeplan.schema import Model, dump_yaml, load_yaml, parse_yaml, validate, write_yaml


class Inner(Model):
    size: int
    rate: float = 0.5


class Outer(Model):
    """A little of everything that the real files have."""

    name: str = ""
    count: Literal["auto"] | int | None = None
    inner: Inner | None = None
    items: tuple[Inner, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    table: dict[str, str] = {}  # noqa: RUF012


inners = st.builds(Inner, size=st.integers(), rate=st.floats(allow_nan=False, allow_infinity=False))
# YAML cannot hold most control characters; neither can our names.
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
number_like = st.from_regex(r"\A[-+]?[0-9._]{0,4}[eE]?[-+]?[0-9:]{0,4}\Z")
outers = st.builds(
    Outer,
    name=st.one_of(
        texts, number_like, st.sampled_from(["1e-4", "null", "no", "on", "0x1", "2020-01-01", "~"])
    ),
    count=st.one_of(st.none(), st.just("auto"), st.integers()),
    inner=st.one_of(st.none(), inners),
    items=st.lists(inners, max_size=3).map(tuple),
    pairs=st.lists(
        st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)), max_size=3
    ).map(tuple),
    table=st.dictionaries(st.one_of(texts, number_like), texts, max_size=3),
)


@settings(deadline=None)
@given(outers)
def test_every_model_survives_its_yaml(outer: Outer) -> None:
    assert validate(parse_yaml(dump_yaml(outer).encode(), "file"), Outer, "file") == outer


def test_a_file_round_trips_with_its_hash_and_header(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "outer.yaml"
    outer = Outer(name="x", items=(Inner(size=3),))
    write_yaml(path, outer, header="one\ntwo")
    assert path.read_text().startswith("# one\n# two\nname: x\n")
    assert load_yaml(path, Outer, "test file") == (outer, sha256_bytes(path.read_bytes()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E+3", -2000.0),
        ("1e5", 1e5),
        ("1.5e3", 1500.0),
        (".5e-1", 0.05),
        ("1.e2", 100.0),
        ("7", 7),
        ("1_0e1", 100.0),
    ],
)
def test_short_floats_are_numbers(text: str, value: float) -> None:
    assert parse_yaml(f"a: {text}".encode(), "file") == {"a": value}


@pytest.mark.parametrize("text", ["1e", "e5", "0x1e5", "1e5x", "1-e5", "'1e5'"])
def test_other_words_stay_words_or_what_they_were(text: str) -> None:
    assert not isinstance(parse_yaml(f"a: {text}".encode(), "file")["a"], float)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "found an empty file"),
        (b"- 1", "found a list"),
        (b"word", "found a str"),
        (b"a: [", "not valid YAML at line 1"),
        (b"a: 1\nb: 2\na: 3", "line 3, column 1: key 'a' is given twice"),
        (b"inner: {size: 1, size: 2}", "key 'size' is given twice"),
        (b"? [1]\n: 2", "a key must be a word"),
        (b"\xff\xfe\xff", "not UTF-8 text"),
        (b"\x00", "not valid YAML"),
        (b"!!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"a: *b", "undefined alias"),
        (b"count: " + b"9" * 6000, "not a sensible YAML file"),
        (b"a: " + b"[" * 1500, "not a sensible YAML file"),
        (b"table: &a {b: *a}", "an anchor contains itself"),
        (b"nmae: x", "unknown key 'nmae'; did you mean 'name'?"),
        (b"inner: {siez: 1}", "unknown key 'inner.siez'; did you mean 'size'? (and 1 more problem)"),
        (b"inner: {size: 1, rat: 2}", "unknown key 'inner.rat'; did you mean 'rate'?"),
        (b"items: [{size: 1}, {siez: 1}]", "unknown key 'items[1].siez'; did you mean 'size'?"),
        (b"zzz: x", "unknown key 'zzz'; valid keys: count, inner, items, name, pairs, table"),
        (b"1: x", "unknown key '1'"),
        (b"inner: {}", "missing key 'inner.size'; add it"),
        (b"name: 3", "key 'name' has value 3: input should be a valid string"),
        (b"inner: {size: '3'}", "key 'inner.size' has value '3': input should be a valid integer"),
        (b"inner: {size: 3.0}", "key 'inner.size' has value 3.0: input should be a valid integer"),
        (b"inner: {size: true}", "key 'inner.size' has value True: input should be a valid integer"),
        (b"inner: {size: 1, rate: .nan}", "input should be a finite number"),
        (b"inner: {size: 1, rate: .inf}", "input should be a finite number"),
        (b"inner: 7", "key 'inner' has value 7: input should be an object"),
        (b"count: many", "key 'count' has value 'many': input should be 'auto' or a valid integer"),
        (b"pairs: [[1, 2.0], [3]]", "missing key 'pairs[1][1]'; add it"),
        (
            b"name: 1\ncount: x\nzzz: 3",
            "unknown key 'zzz'; valid keys: count, inner, items, name, pairs, table (and 2 more",
        ),
        (b"name: " + b"[" + b"1, " * 100 + b"1]", "..."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(raw: bytes, message: str) -> None:
    with pytest.raises(SchemaError) as refusal:
        validate(parse_yaml(raw, "file f.yaml"), Outer, "file f.yaml")
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("file f.yaml: ")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_a_mapping_or_a_schema_error(raw: bytes) -> None:
    try:
        answer: object = parse_yaml(raw, "file")
    except SchemaError as refusal:
        answer = str(refusal)
    assert isinstance(answer, dict) or (isinstance(answer, str) and "\n" not in answer)


def test_whole_numbers_serve_as_floats() -> None:
    assert validate({"inner": {"size": 1, "rate": 2}}, Outer, "file").inner == Inner(size=1, rate=2.0)
    assert math.isclose(Inner(size=1).rate, 0.5)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"test file .*none.yaml does not exist"):
        load_yaml(tmp_path / "none.yaml", Outer, "test file")
    with pytest.raises(FileError, match="is a directory"):
        load_yaml(tmp_path, Outer, "test file")


def test_models_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().name = "y"  # type: ignore[misc]
