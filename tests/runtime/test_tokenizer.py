"""Tokenizers: lossless, deterministic, safe against special words in text, and honest about bad files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import DataError
from eeplan.runtime import tokenizer as module
from eeplan.runtime.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    TextStream,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
)

PROSE = [topics[name] for name in sorted(topics)[:20]]
BPE = train_bpe(PROSE, 600)
KINDS: list[Tokenizer] = [byte_tokenizer(), BPE]
both_kinds = pytest.mark.parametrize("tokenizer", KINDS, ids=lambda tokenizer: tokenizer.kind)
# Words of the training text among arbitrary characters, so that merges are used too.
texts = st.lists(st.one_of(st.text(), st.sampled_from(PROSE[0].split(" "))), max_size=12).map(" ".join)


@both_kinds
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert tokenizer.eod not in ids
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]
    assert tokenizer.encode_batch([]) == []


@both_kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also for ids that are no UTF-8, as an untrained model emits them."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    parts = tokenizer.token_texts(ids)
    assert len(parts) == len(ids)
    assert "".join(parts) == tokenizer.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_texts(tokenizer.encode("a€b")) == ["a", "", "", "€", "b"]
    stream = TextStream(tokenizer)
    assert [stream.push(token_id) for token_id in tokenizer.encode("€")[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"
    # Control: decoding token by token would tear the character.
    assert "".join(tokenizer.decode([token_id]) for token_id in tokenizer.encode("€")) != "€"


def test_bpe_compresses_and_keeps_end_of_text_last() -> None:
    text = PROSE[3]
    assert len(BPE.encode(text)) < 0.6 * len(byte_tokenizer().encode(text))
    assert BPE.vocab_size == 600
    assert BPE.eod == 599
    assert BPE.decode([BPE.eod]) == ""
    assert BPE.token_bytes(BPE.encode(" the")) == [b" the"]


@both_kinds
def test_the_words_of_end_of_text_are_words(tokenizer: Tokenizer) -> None:
    text = f"one{END_OF_TEXT}two"
    assert tokenizer.eod not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_the_guard_text_could_end_a_document() -> None:
    """Control of the test above: the library's default turns the words into the token."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(BPE._model()))
    assert BPE.eod in library.encode(f"one{END_OF_TEXT}two").ids


@settings(max_examples=30, deadline=None)
@given(
    text=st.text(alphabet="ab \n\t'é", min_size=40, max_size=300),
    piece_chars=st.integers(1, 60),
)
def test_long_text_is_cut_where_it_does_not_show(text: str, piece_chars: int) -> None:
    whole = BPE.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARS", piece_chars)
        pieces = list(module._pieces(text))
        assert "".join(pieces) == text
        assert BPE.encode(text) == whole
    # Control: seams elsewhere do show.
    assert BPE.encode("the\n\n  a")[:2] != BPE.encode("the\n\n") + BPE.encode("  a")[:1]


def test_long_text_is_cut_at_all() -> None:
    text = "a line of text\n" * 20_000
    assert len(list(module._pieces(text))) == -(-len(text) // module._PIECE_CHARS)


def test_training_twice_gives_the_same_file() -> None:
    """Also in another process, with one thread and another hash seed; other texts give another file."""
    code = (
        "from pydoc_data.topics import topics\nfrom eeplan.runtime.tokenizer import train_bpe\n"
        "print(train_bpe([topics[name] for name in sorted(topics)[:20]], 600).sha256)"
    )
    env = {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == BPE.sha256
    assert train_bpe(PROSE[1:], 600).sha256 != BPE.sha256


def test_a_small_text_yields_a_small_vocabulary() -> None:
    tokenizer = train_bpe(["abab abab"], 5000)
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.eod == tokenizer.vocab_size - 1


@both_kinds
def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "some.folder" / "tok.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizer.sha256 == loaded.sha256
    assert (loaded.kind, loaded.vocab_size, loaded.eod) == (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.eod,
    )
    assert loaded.encode(PROSE[5]) == tokenizer.encode(PROSE[5])
    assert tokenizer.eod not in loaded.encode(END_OF_TEXT)


def _document(**changes: Any) -> bytes:
    return json.dumps(json.loads(BPE._dump()) | changes).encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        (b"", "is not JSON"),
        (b"{\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"version": "1.0", "model": {}}', "is not a tokenizer file"),
        (_document(format_version=2), "format_version 2"),
        (_document(kind="words"), "kind 'words'; expected 'byte' or 'bpe'"),
        (_document(model=None), "damaged BPE model"),
        (_document(model=BPE._model() | {"added_tokens": []}), "damaged BPE model"),
        (_document(model=BPE._model() | {"model": {"type": "BPE", "vocab": {"a": 7}}}), "damaged BPE model"),
        (_document(vocab_size=601), "states vocab_size 601"),
        (_document(eod=0), "eod 0"),
    ],
)
def test_bad_tokenizer_files(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "tok.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load_tokenizer(path)
    assert "eeplan data build" in str(error.value) or "expected" in str(error.value)
    assert expected in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("token_id", [-1, 257, 10**6])
def test_ids_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(DataError, match=f"token id {token_id} is outside the tokenizer's vocabulary of 257"):
        byte_tokenizer().decode([65, token_id])


@both_kinds
def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"lone surrogate U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(DataError, match="at least 258"):
        train_bpe(PROSE, 257)
    assert isinstance(train_bpe(PROSE, 258), BpeTokenizer)


def test_errors_of_the_text_source_reach_the_caller() -> None:
    def texts() -> Any:
        yield "good"
        raise DataError("line 2 is bad")

    with pytest.raises(DataError, match="line 2 is bad"):
        train_bpe(texts(), 300)


def test_imports_without_torch() -> None:
    code = (
        "import sys, eeplan.runtime.tokenizer, eeplan.runtime.corpus, eeplan.runtime.data\n"
        "eeplan.runtime.tokenizer.byte_tokenizer().encode('x')\n"
        "print([name for name in ('torch', 'megatron', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
