"""Building datasets: what is in the files, what an error says, and that nothing half-written remains."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import build_small, numbered_texts, wide_tokenizer, write_jsonl

from eeplan.errors import DataError
from eeplan.runtime import data as module
from eeplan.runtime.data import DataFiles, build_command, build_dataset, build_from_texts, read_summary
from eeplan.runtime.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe


def stored_documents(files: DataFiles) -> list[list[int]]:
    """Token ids of every document, read back by megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(files.prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_text_and_jsonl_files(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"first\r\ndocument \xe2\x82\xac\n")
    (tmp_path / "bom.md").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "empty.txt").write_bytes(b"")
    lines = [{"text": "second\n\nx"}, {"text": ""}, {"body": 1, "text": "<|endoftext|>"}]
    (tmp_path / "more.jsonl").write_text("\n" + "\n\n".join(map(json.dumps, lines)))
    inputs = [tmp_path / name for name in ("one.txt", "bom.md", "empty.txt", "more.jsonl")]
    files = DataFiles(tmp_path / "out" / "deep" / "set.v1")
    summary = build_dataset(inputs, files.prefix, byte_tokenizer())
    expected = ["first\r\ndocument €\n", "with a mark", "second\n\nx", "<|endoftext|>"]
    assert stored_documents(files) == [[*text.encode(), 256] for text in expected]
    assert (summary.documents, summary.skipped_documents) == (4, 2)
    assert summary.text_bytes == sum(len(text.encode()) for text in expected)
    assert summary.tokens == summary.text_bytes + 4
    assert summary == read_summary(files)
    assert sorted(os.listdir(files.prefix.parent)) == sorted(path.name for path in files.all)
    assert load_tokenizer(files.tokenizer).sha256 == summary.tokenizer_sha256 == byte_tokenizer().sha256


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(), min_size=1, max_size=6).filter(any),
    append_eod=st.booleans(),
    key=st.sampled_from(["text", "größe"]),
)
def test_documents_come_back_from_jsonl(texts: list[str], append_eod: bool, key: str) -> None:
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROUP_CHARS", 5)
        source = write_jsonl(Path(folder, "in.jsonl"), texts, key)
        files = DataFiles(Path(folder, "out"))
        build_dataset([source], files.prefix, tokenizer, jsonl_key=key, append_eod=append_eod)
        stored = stored_documents(files)
    kept = [text for text in texts if text]
    assert [tokenizer.decode(ids) for ids in stored] == kept
    assert all((ids[-1] == tokenizer.eod) == append_eod for ids in stored)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = numbered_texts(20)
    tokenizer = train_bpe(texts, 400)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        build_small(tmp_path / name, texts, tokenizer)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    build_small(tmp_path / "b", texts[::-1], tokenizer)
    assert snapshot(tmp_path / "a") != snapshot(tmp_path / "b")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(40_000, "uint16"), (65_499, "uint16"), (70_000, "int32")])
def test_large_ids_survive(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokenizer = wide_tokenizer(vocab_size)
    late = range(vocab_size - 200, vocab_size - 1)
    text = b" ".join(tokenizer.token_bytes(late)).decode()
    ids = tokenizer.encode(text)
    assert set(late) <= set(ids)
    files = build_small(tmp_path, [text], tokenizer)
    assert read_summary(files).token_dtype == dtype
    assert stored_documents(files) == [[*ids, vocab_size - 1]]
    # Control: 16 bits with a sign, or without for the largest vocabulary, would not do.
    narrow = np.int16 if dtype == "uint16" else np.uint16
    assert np.array([*ids, vocab_size - 1]).astype(narrow).tolist() != [*ids, vocab_size - 1]


def test_unigram_entropy(tmp_path: Path) -> None:
    def entropy(texts: list[str], append_eod: bool = False) -> float:
        summary = build_from_texts(texts, tmp_path / "x", byte_tokenizer(), append_eod=append_eod)
        return summary.unigram_entropy_nats

    assert entropy(["ab" * 50, "ba"]) == pytest.approx(math.log(2), rel=1e-12)
    assert entropy(["a"]) == 0
    assert entropy(["a"], append_eod=True) == pytest.approx(math.log(2), rel=1e-12)
    assert entropy(["aaab"]) == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-12)


def test_progress_ends_at_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROUP_CHARS", 100)
    source = write_jsonl(tmp_path / "in.jsonl", numbered_texts(10))
    seen: list[tuple[int, int]] = []
    build_dataset([source], tmp_path / "x", byte_tokenizer(), progress=lambda *both: seen.append(both))
    size = source.stat().st_size
    assert len(seen) == 10
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


Case = Callable[[Path], list[Path]]


def _file(name: str, content: bytes) -> Case:
    def make(folder: Path) -> list[Path]:
        good = write_jsonl(folder / "good.jsonl", ["good"])
        (folder / name).write_bytes(content)
        return [good, folder / name]

    return make


BAD_INPUTS: dict[str, tuple[Case, str]] = {
    "missing": (lambda folder: [folder / "absent.txt"], "absent.txt cannot be read (No such file"),
    "folder": (lambda folder: [folder], "is a folder; give the files inside it"),
    "no inputs": (lambda folder: [], "hold no text"),
    "only empty": (lambda folder: [write_jsonl(folder / "a.jsonl", ["", ""])], "hold no text"),
    "binary text": (_file("b.txt", b"abc\xff"), "b.txt is not UTF-8: byte 0xff at offset 3"),
    "binary line": (_file("b.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n'), "byte 0xe9 at offset 24"),
    "broken line": (
        _file("b.jsonl", b'{"text": "x"}\n\n{"text": \n'),
        "b.jsonl:3: not JSON (Expecting value",
    ),
    "two objects": (_file("b.jsonl", b'{"text": "x"} {"text": "y"}\n'), "b.jsonl:1: not JSON (Extra data"),
    "deep": (_file("b.jsonl", b'{"text":' + b"[" * 100_000), "b.jsonl:1: JSON is nested too deeply"),
    "huge number": (_file("b.jsonl", b'{"text":' + b"1" * 10_000 + b"}"), "b.jsonl:1: not JSON"),
    "no object": (_file("b.jsonl", b'"text"\n'), "b.jsonl:1: expected a JSON object, found str"),
    "no key": (_file("b.jsonl", b'{"body": "x", "id": 1}\n'), "b.jsonl:1: no key 'text' (keys: body, id)"),
    "not a string": (_file("b.jsonl", b'{"text": null}\n'), "key 'text' holds NoneType, expected a string"),
    "surrogate": (_file("b.jsonl", b'{"text": "x\\ud800"}\n'), "b.jsonl:1: lone surrogate U+D800"),
}


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(tmp_path: Path, case: str, kind: str) -> None:
    make, expected = BAD_INPUTS[case]
    (tmp_path / "in").mkdir()
    inputs = make(tmp_path / "in")
    with pytest.raises(DataError) as error:
        build_command(inputs, tmp_path / "out" / "x", kind)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert snapshot(tmp_path / "out") == {}


def _interrupted(*_: int) -> None:
    raise KeyboardInterrupt


def _no_rename(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("when", ["bad input", "Ctrl-C", "disk full"])
def test_a_failed_build_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    build_small(tmp_path)
    before = snapshot(tmp_path)
    if when == "bad input":
        with pytest.raises(DataError, match="lone surrogate"):
            build_from_texts(["good", "\ud800"], tmp_path / "text", byte_tokenizer())
    elif when == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            build_from_texts(["new"], tmp_path / "text", byte_tokenizer(), progress=_interrupted)
    else:
        monkeypatch.setattr(Tokenizer, "save", _no_rename)
        with pytest.raises(DataError, match="No space left on device"):
            build_from_texts(["new"], tmp_path / "text", byte_tokenizer())
    assert snapshot(tmp_path) == before
    assert len(os.listdir(tmp_path)) == 4
    # Control: the snapshot would have shown a build.
    monkeypatch.undo()
    build_from_texts(["new"], tmp_path / "text", byte_tokenizer())
    assert snapshot(tmp_path) != before


def test_a_build_cut_while_moving_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are moved one by one; without its summary, put in place last, a dataset does not count."""
    files = build_small(tmp_path)
    replace = os.replace

    def stop_at_idx(source: Path, target: Path) -> None:
        if target == files.idx:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_idx)
    with pytest.raises(KeyboardInterrupt):
        build_from_texts(["new"], files.prefix, byte_tokenizer())
    with pytest.raises(DataError, match="does not exist"):
        read_summary(files)


def test_outputs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"Not a directory|File exists"):
        build_from_texts(["x"], tmp_path / "file" / "x", byte_tokenizer())
    (tmp_path / "y.idx").mkdir()
    with pytest.raises(DataError, match=r"y\.idx is a folder"):
        build_from_texts(["x"], tmp_path / "y", byte_tokenizer())
    with pytest.raises(DataError, match="names no file"):
        build_from_texts(["x"], Path("."), byte_tokenizer())

    def denied(**_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", denied)
    with pytest.raises(DataError, match=r"Permission denied\); choose another output folder"):
        build_from_texts(["x"], tmp_path / "z", byte_tokenizer())
    assert sorted(os.listdir(tmp_path)) == ["file", "y.idx"]


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "book.json"
    source.write_text("text")
    with pytest.raises(DataError, match=r"book\.json would be overwritten"):
        build_dataset([source], tmp_path / "book", byte_tokenizer())
    assert source.read_text() == "text"


def test_command_tokenizers(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", numbered_texts(30))
    first = build_command([source], tmp_path / "a", "bpe", 300)
    assert (first.tokenizer_kind, first.vocab_size) == ("bpe", 300)
    again = build_command([source], tmp_path / "b", tmp_path / "a.tokenizer.json")
    assert again == first
    assert build_command([source], tmp_path / "c", "byte").vocab_size == 257
    with pytest.raises(DataError, match="has no effect on tokenizer 'byte'"):
        build_command([source], tmp_path / "d", "byte", 300)
    with pytest.raises(DataError, match="does not exist"):
        build_command([source], tmp_path / "d", tmp_path / "absent.json")
    with pytest.raises(DataError, match="too small for a BPE"):
        build_command([source], tmp_path / "d", "bpe", 10)
