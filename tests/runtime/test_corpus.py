"""The demo's corpus: deterministic, sized, mixed, without tests, tables or copies."""

from __future__ import annotations

import sys

import pytest

from eeplan.errors import DataError
from eeplan.runtime.corpus import DEFAULT_SIZE_BYTES, demo_corpus

CORPUS = demo_corpus()


def _size(corpus: list[tuple[str, str]]) -> int:
    return sum(len(text.encode()) for _, text in corpus)


def test_the_same_corpus_every_time() -> None:
    assert demo_corpus() == CORPUS


@pytest.mark.parametrize("size_bytes", [1, 50_000, 700_000, 3_000_000])
def test_size_is_respected(size_bytes: int) -> None:
    corpus = demo_corpus(size_bytes)
    assert len(corpus) == 1 or _size(corpus) <= size_bytes
    assert set(corpus) <= set(demo_corpus(2 * size_bytes))


def test_default_size() -> None:
    assert 4_000_000 < _size(CORPUS) <= DEFAULT_SIZE_BYTES <= 8_000_000


def test_prose_and_code_but_no_tests_and_tables() -> None:
    names = [name for name, _ in demo_corpus(10**9)]
    assert {"topics/assignment", "lib/json/decoder.py", "lib/argparse.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "encodings"} & set(name.split("/"))]
    assert not {"lib/stringprep.py", "lib/html/entities.py", "lib/pydoc_data/topics.py"} & set(names)


def test_every_text_once_and_none_empty() -> None:
    texts = [text for _, text in CORPUS]
    assert len(set(texts)) == len(texts)
    assert all(text.strip() for text in texts)


def test_any_stretch_is_a_fair_sample() -> None:
    """The last tenth, which validation reads, holds prose and code in about the proportion of the whole."""
    share = sum(name.startswith("topics/") for name, _ in CORPUS) / len(CORPUS)
    tail = CORPUS[-len(CORPUS) // 10 :]
    tail_share = sum(name.startswith("topics/") for name, _ in tail) / len(tail)
    assert 0.3 * share < tail_share < 2 * share
    # Control: in alphabetical order the tail is prose alone.
    assert all(name.startswith("topics/") for name, _ in sorted(CORPUS)[-len(CORPUS) // 10 :])


def test_without_topics_the_library_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    names = [name for name, _ in demo_corpus(200_000)]
    assert names
    assert all(name.startswith("lib/") for name in names)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="give a positive number"):
        demo_corpus(0)
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    with pytest.raises(DataError, match="give text files instead"):
        demo_corpus()
