"""check_data: passes what a build wrote, and names whatever was done to it since."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import make_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_data import build_small, run_for

from eeplan.errors import DataError
from eeplan.runtime.data import DataFiles, check_data
from eeplan.runtime.dataset_files import part_documents
from eeplan.runtime.tokenizer import train_bpe
from eeplan.spec import DataSpec, RunSpec


@pytest.fixture
def files(tmp_path: Path) -> DataFiles:
    return build_small(tmp_path)


def test_intact_data_passes(files: DataFiles) -> None:
    (summary,) = check_data(run_for(files), read_tokens=True)
    assert (summary.documents, summary.vocab_size) == (40, 257)


def test_check_needs_no_torch(files: DataFiles) -> None:
    code = (
        "import sys\nfrom eeplan.runtime.data import check_data\nfrom eeplan.spec import RunSpec\n"
        "check_data(RunSpec.model_validate_json(sys.argv[1]))\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, run_for(files).model_dump_json()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == "[]", result.stderr


def _edit(path: Callable[[DataFiles], Path], change: Callable[[bytes], bytes]) -> Callable[[DataFiles], None]:
    def apply(files: DataFiles) -> None:
        path(files).write_bytes(change(path(files).read_bytes()))

    return apply


def _idx(change: Callable[[bytes], bytes]) -> Callable[[DataFiles], None]:
    return _edit(lambda files: files.idx, change)


def _put(raw: bytes, offset: int, value: bytes) -> bytes:
    return raw[:offset] + value + raw[offset + len(value) :]


def _summary(**changes: object) -> Callable[[DataFiles], None]:
    def change(raw: bytes) -> bytes:
        return json.dumps(json.loads(raw) | changes).encode()

    return _edit(lambda files: files.summary, change)


DAMAGE: dict[str, tuple[Callable[[DataFiles], None], str]] = {
    "no summary": (lambda f: f.summary.unlink(), "text.json does not exist"),
    "summary no JSON": (_edit(lambda f: f.summary, lambda raw: raw[:50]), "text.json is not JSON"),
    "summary no object": (_edit(lambda f: f.summary, lambda raw: b"[]"), "text.json: "),
    "summary other version": (_summary(schema_version=2), "schema_version"),
    "summary unknown key": (_summary(dokuments=3), "did you mean 'documents'"),
    "no bin": (lambda f: f.bin.unlink(), "text.bin does not exist"),
    "no idx": (lambda f: f.idx.unlink(), "text.idx does not exist"),
    "no tokenizer": (lambda f: f.tokenizer.unlink(), "text.tokenizer.json does not exist"),
    "bin truncated": (_edit(lambda f: f.bin, lambda raw: raw[:-2]), "its index accounts for"),
    "bin longer": (_edit(lambda f: f.bin, lambda raw: raw + b"x"), "its index accounts for"),
    "idx empty": (_idx(lambda raw: b""), "not a megatron index"),
    "idx other file": (_idx(lambda raw: b"PK\x03\x04" + raw), "does not begin with MMIDIDX"),
    "idx header cut": (_idx(lambda raw: raw[:20]), "truncated: 20 bytes, its header alone has 34"),
    "idx cut": (_idx(lambda raw: raw[:-1]), "is truncated"),
    "idx too long": (_idx(lambda raw: raw + b"\0"), "is too long"),
    "idx version": (_idx(lambda raw: _put(raw, 9, struct.pack("<Q", 2))), "has version 2, expected 1"),
    "idx type": (_idx(lambda raw: _put(raw, 17, b"\x06")), "token type code 6"),
    "idx wider type": (_idx(lambda raw: _put(raw, 17, b"\x04")), "corrupt: lengths and offsets"),
    "idx length": (_idx(lambda raw: _put(raw, 34, struct.pack("<i", 5))), "corrupt: lengths and offsets"),
    "idx negative": (_idx(lambda raw: _put(raw, 34, struct.pack("<i", -5))), "corrupt: lengths and offsets"),
    "idx offset": (
        _idx(lambda raw: _put(raw, 34 + 160, struct.pack("<q", 8))),
        "corrupt: lengths and offsets",
    ),
    "idx documents": (_idx(lambda raw: _put(raw, 34 + 480, struct.pack("<q", 1))), "one sequence each"),
    "idx of another build": (_summary(idx_sha256="0" * 64), "does not belong to"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(files: DataFiles, case: str) -> None:
    damage, expected = DAMAGE[case]
    run = run_for(files)
    check_data(run)
    damage(files)
    with pytest.raises(DataError) as error:
        check_data(run)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert "eeplan data build" in str(error.value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataFiles, RunSpec, bytes]:
    files = build_small(tmp_path_factory.mktemp("shared"))
    return files, run_for(files), files.idx.read_bytes()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_change_of_the_index_passes(shared: tuple[DataFiles, RunSpec, bytes], data: st.DataObject) -> None:
    """Any cut, any changed byte: one line, never another exception."""
    files, run, intact = shared
    position = data.draw(st.integers(0, len(intact) - 1))
    flip = data.draw(st.integers(0, 255))
    changed = _put(intact, position, bytes([intact[position] ^ flip])) if flip else intact[:position]
    files.idx.write_bytes(changed)
    try:
        with pytest.raises(DataError):
            check_data(run)
    finally:
        files.idx.write_bytes(intact)
    check_data(run)


def test_changed_tokens_are_found_when_asked(files: DataFiles) -> None:
    raw = files.bin.read_bytes()
    files.bin.write_bytes(_put(raw, 10, bytes([raw[10] ^ 1])))
    check_data(run_for(files))
    with pytest.raises(DataError, match="was changed after it was built"):
        check_data(run_for(files), read_tokens=True)


def test_another_tokenizer_is_refused(files: DataFiles) -> None:
    other = DataFiles(files.prefix.parent / "other")
    train_bpe(["some text"], 300).save(other.tokenizer)
    run = run_for(files)
    changed = run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": str(other.tokenizer)})})
    with pytest.raises(DataError, match=r"is not the one that .*text\.bin was built with"):
        check_data(changed)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(files: DataFiles) -> None:
    with pytest.raises(
        DataError, match=r"has 257 tokens, model\.vocab_size is 256; set model\.vocab_size to 257"
    ):
        check_data(run_for(files, model__vocab_size=256))
    check_data(run_for(files, model__vocab_size=258))


def test_parts_without_a_sequence_are_refused(tmp_path: Path) -> None:
    files = build_small(tmp_path, ["x" * 39])  # 40 tokens with end-of-text
    check_data(run_for(files, split="1,0,0", training__seq_length=39))
    with pytest.raises(DataError, match=r"the train part .* with 40 tokens; one sequence needs 41"):
        check_data(run_for(files, split="1,0,0", training__seq_length=40))
    with pytest.raises(DataError, match=r"the valid part of data\.split '95,5,0' is 0 of the 1 documents"):
        check_data(run_for(files, split="95,5,0"))


@settings(max_examples=100, deadline=None)
@given(
    weights=st.tuples(
        *[st.one_of(st.integers(0, 100), st.floats(0, 1).map(lambda x: round(x, 4)))] * 3
    ).filter(lambda weights: weights[0] > 0),
    documents=st.integers(1, 5000),
)
@example(weights=(99, 1, 0), documents=50)
@example(weights=(1, 1, 1), documents=3)
def test_parts_are_megatrons_parts(weights: tuple[float, ...], documents: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    split = ",".join(str(weight) for weight in weights)
    ours = part_documents(DataSpec(data_path="x", tokenizer="y", split=split), documents)
    if "e" in split:
        return  # megatron's parser takes 1e-05 for two numbers
    for bounds, part in zip(
        convert_split_vector_to_split_matrix(parse_and_normalize_split(split)), ours.values(), strict=True
    ):
        low, high = bounds or (0.0, 0.0)
        theirs = range(round(low * documents), round(high * documents))
        assert part == theirs or len(part) == len(theirs) == 0


def test_paths_come_from_the_run() -> None:
    with pytest.raises(DataError, match=r"data/text\.json does not exist"):
        check_data(make_run())
