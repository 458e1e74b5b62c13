"""Text to training data: ``.txt`` and ``.jsonl`` files become a megatron indexed dataset.

A build writes under temporary names and puts its files in place together at the end; an error or Ctrl-C
leaves what was there before. This module is also where the rest of eeplan finds :func:`check_data` and
:func:`build_batches`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import DataError
from eeplan.runtime.batches import BatchStream, Microbatch, RankInfo, build_batches
from eeplan.runtime.dataset_files import (
    DataFiles,
    DataSummary,
    check_data,
    file_sha256,
    part_documents,
    read_summary,
)
from eeplan.runtime.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "BatchStream",
    "DataFiles",
    "DataSummary",
    "Microbatch",
    "Progress",
    "RankInfo",
    "build_batches",
    "build_command",
    "build_dataset",
    "build_from_texts",
    "check_data",
    "dataset_of_file",
    "part_documents",
    "read_summary",
]

Progress = Callable[[int, int], None]
"""Called with input bytes done and in all, after every group of documents."""

DEFAULT_BPE_VOCAB_SIZE = 4096
_GROUP_CHARS = 1 << 22
"""Text handed to the tokenizer at once: enough for its threads, little enough to keep in memory."""


@dataclass(frozen=True, slots=True)
class _Document:
    text: str
    input_bytes: int


@contextlib.contextmanager
def dataset_of_file(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Path, DataSummary]]:
    """Prefix and summary of a dataset that a text file is made into for the body, and that is gone after it.

    For commands that take either: a prefix whose summary is there needs none of this.

    Raises:
        DataError: no such file; what :func:`build_dataset` raises.
    """
    if not path.is_file():
        raise DataError(
            f"{path} is no text file, and no dataset's prefix, as {DataFiles(path).summary} is not there; "
            "give one of both"
        )
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "text"
        yield prefix, build_dataset([path], prefix, tokenizer)


def build_dataset(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    jsonl_key: str = "text",
    append_eod: bool = True,
    progress: Progress | None = None,
) -> DataSummary:
    """Tokenize files into ``<prefix>.bin``, ``.idx``, ``.tokenizer.json`` and ``.json``.

    Args:
        inputs: ``.jsonl`` files give one document a line, from ``jsonl_key``; any other file is one document.
        output_prefix: path of the results without their endings; folders are made.
        append_eod: close every document with the end-of-text token.

    Returns:
        What was written. Documents without text are left out and counted as skipped.

    Raises:
        DataError: an input is missing, not UTF-8 (with the byte offset), or a broken JSON line; no text at
            all; the folder cannot be written; an input would be overwritten.
    """
    sizes = [_input_bytes(path) for path in inputs]
    files = DataFiles(Path(output_prefix))
    outputs = {path.resolve() for path in files.all}
    for path in inputs:
        if path.resolve() in outputs:
            raise DataError(f"input {path} would be overwritten by the output; choose another output prefix")
    documents = (document for path in inputs for document in _read_documents(path, jsonl_key))
    return _write_dataset(documents, sum(sizes), files, tokenizer, append_eod, progress)


def build_from_texts(
    texts: Sequence[str],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
    progress: Progress | None = None,
) -> DataSummary:
    """:func:`build_dataset` for texts in memory, one document each (the demo's corpus)."""
    documents = [_Document(text, _utf8_bytes(text, f"text {index}")) for index, text in enumerate(texts)]
    total = sum(document.input_bytes for document in documents)
    return _write_dataset(documents, total, DataFiles(Path(output_prefix)), tokenizer, append_eod, progress)


def build_command(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Literal["byte", "bpe"] | str | Path = "bpe",
    vocab_size: int | None = None,
    *,
    jsonl_key: str = "text",
    append_eod: bool = True,
    progress: Progress | None = None,
) -> DataSummary:
    """What ``eeplan data build`` does: get a tokenizer, then :func:`build_dataset`.

    Args:
        tokenizer: ``byte``; ``bpe`` to train one on the inputs; or the path of a tokenizer file.
        vocab_size: for ``bpe`` only; None means 4,096. A small text may yield fewer tokens.

    Raises:
        DataError: as :func:`build_dataset`; ``vocab_size`` given where it has no meaning.
    """
    if vocab_size is not None and tokenizer != "bpe":
        raise DataError(
            f"vocabulary size {vocab_size} has no effect on tokenizer '{tokenizer}', whose vocabulary is "
            "fixed; leave it out, or choose the tokenizer 'bpe'"
        )
    for path in inputs:
        _input_bytes(path)
    chosen: Tokenizer
    if tokenizer == "byte":
        chosen = byte_tokenizer()
    elif tokenizer == "bpe":
        texts = (document.text for path in inputs for document in _read_documents(path, jsonl_key))
        chosen = train_bpe(texts, DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size)
    else:
        chosen = load_tokenizer(tokenizer)
    return build_dataset(
        inputs, output_prefix, chosen, jsonl_key=jsonl_key, append_eod=append_eod, progress=progress
    )


def _input_bytes(path: Path) -> int:
    if path.is_dir():
        raise DataError(f"input {path} is a folder; give the files inside it")
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"input {path} cannot be read ({error.strerror}); check the path") from None


def _read_documents(path: Path, jsonl_key: str) -> Iterator[_Document]:
    try:
        with path.open("rb") as file:
            if path.suffix != ".jsonl":
                raw = file.read()
                yield _Document(_decode(raw, path, 0), len(raw))
                return
            offset = 0
            for number, line in enumerate(file, start=1):
                text = _decode(line, path, offset)
                offset += len(line)
                if text.strip():
                    yield _Document(_json_text(text, f"{path}:{number}", jsonl_key), len(line))
    except OSError as error:
        raise DataError(f"input {path} cannot be read ({error.strerror}); check the path") from None


def _decode(raw: bytes, path: Path, offset: int) -> str:
    """UTF-8 text of ``raw``, which stands ``offset`` bytes into ``path``; a byte order mark is dropped."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"input {path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}; "
            "convert it, for example with iconv"
        ) from None
    return text.removeprefix("\ufeff") if offset == 0 else text


def _json_text(line: str, where: str, key: str) -> str:
    try:
        document: Any = json.loads(line)
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply; expected an object with '{key}'") from None
    except ValueError as error:
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{where}: not JSON ({reason}{column}); expected one object per line") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(document).__name__}")
    if key not in document:
        keys = ", ".join(sorted(document)) or "none"
        raise DataError(f"{where}: no key '{key}' (keys: {keys}); name the key that holds the text")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: key '{key}' holds {type(text).__name__}, expected a string")
    _utf8_bytes(text, where)
    return text


def _utf8_bytes(text: str, where: str) -> int:
    """Length of ``text`` in UTF-8; JSON escapes can name surrogates, which it does not have."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which UTF-8 "
            "cannot store; remove it"
        ) from None


def _write_dataset(
    documents: Iterable[_Document],
    total_bytes: int,
    files: DataFiles,
    tokenizer: Tokenizer,
    append_eod: bool,
    progress: Progress | None,
) -> DataSummary:
    """Build in a temporary folder beside the target, then move every file into place."""
    folder = files.prefix.parent
    if not files.prefix.name:
        raise DataError(f"output prefix {str(files.prefix)!r} names no file; give one such as data/text")
    for path in files.all:
        if path.is_dir():
            raise DataError(f"output {path} is a folder; choose another output prefix")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{files.prefix.name}."))
    except OSError as error:
        raise DataError(
            f"cannot write data into {folder} ({error.strerror}); choose another output folder"
        ) from None
    try:
        staged = DataFiles(temporary / "data")
        summary = _write_files(documents, total_bytes, staged, tokenizer, append_eod, progress)
        # The summary vouches for the others: out of the way first, back in place last.
        files.summary.unlink(missing_ok=True)
        for source, target in zip(staged.all, files.all, strict=True):
            os.replace(source, target)
    except OSError as error:
        raise DataError(
            f"cannot write data {files.prefix} ({error.strerror}); make room or choose another output folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return summary


def _write_files(
    documents: Iterable[_Document],
    total_bytes: int,
    files: DataFiles,
    tokenizer: Tokenizer,
    append_eod: bool,
    progress: Progress | None,
) -> DataSummary:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(files.bin), dtype=dtype)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    written = skipped = text_bytes = done_bytes = 0
    with contextlib.closing(builder.data_file):
        for group in _groups(documents):
            with_text = [document for document in group if document.text]
            for ids in _encode(with_text, tokenizer, append_eod, dtype):
                builder.add_document(ids, [len(ids)])
                counts += np.bincount(ids, minlength=tokenizer.vocab_size)
            written += len(with_text)
            skipped += len(group) - len(with_text)
            text_bytes += sum(len(document.text.encode()) for document in with_text)
            done_bytes += sum(document.input_bytes for document in group)
            if progress is not None:
                progress(done_bytes, total_bytes)
        if not written:
            raise DataError("the inputs hold no text; give at least one document that is not empty")
        builder.finalize(str(files.idx))
    tokenizer.save(files.tokenizer)
    summary = DataSummary(
        documents=written,
        skipped_documents=skipped,
        tokens=int(counts.sum()),
        text_bytes=text_bytes,
        append_eod=append_eod,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        tokenizer_kind=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        unigram_entropy_nats=_entropy_nats(counts),
        token_dtype="uint16" if dtype is np.uint16 else "int32",
        bin_bytes=files.bin.stat().st_size,
        bin_sha256=file_sha256(files.bin),
        idx_sha256=file_sha256(files.idx),
    )
    files.summary.write_text(json.dumps(summary.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    return summary


def _groups(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    """Documents in groups of about ``_GROUP_CHARS`` characters, in order."""
    group: list[_Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(
    documents: Sequence[_Document], tokenizer: Tokenizer, append_eod: bool, dtype: Any
) -> Iterator[NDArray[Any]]:
    end = [tokenizer.eod] if append_eod else []
    for ids in tokenizer.encode_batch([document.text for document in documents]):
        yield np.array(ids + end, dtype=dtype)


def _entropy_nats(counts: NDArray[np.int64]) -> float:
    """Entropy of the token frequencies, nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
