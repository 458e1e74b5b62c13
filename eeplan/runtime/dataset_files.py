"""What a built dataset consists of on disk, and whether it is whole and fits a run.

Megatron's ``.bin`` (token ids, one document after another) and ``.idx`` (lengths and offsets), the tokenizer
file, and a summary. Checks read the index and sizes, not the tokens, and need neither torch nor
megatron-core.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import DataError, FileError, SchemaError
from eeplan.files import read_bytes
from eeplan.runtime.tokenizer import Tokenizer, load_tokenizer
from eeplan.schema import Model, validate
from eeplan.spec import DataSpec, RunSpec

__all__ = [
    "PARTS",
    "DataFiles",
    "DataSummary",
    "Part",
    "check_data",
    "file_sha256",
    "part_documents",
    "read_summary",
]

Part = Literal["train", "valid", "test"]
"""Parts of the documents: trained on, evaluated during training, evaluated once at its end."""
PARTS: tuple[Part, ...] = ("train", "valid", "test")

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""
_DTYPES: dict[int, np.dtype[np.integer]] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
"""Megatron's codes of the two types that token ids are stored in."""
_REBUILD = "build it again with 'eeplan data build'"


class DataSummary(Model):
    """What ``eeplan data build`` wrote: ``<prefix>.json``."""

    schema_version: Literal[1] = 1
    documents: int
    skipped_documents: int
    """Inputs without text; they became no document."""
    tokens: int
    """End-of-text tokens included."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    append_eod: bool
    vocab_size: int
    eod: int
    tokenizer_kind: str
    tokenizer_sha256: str
    unigram_entropy_nats: float
    """Entropy of the token frequencies, nats per token: the loss of a model that ignores context."""
    token_dtype: Literal["uint16", "int32"]
    bin_bytes: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Paths of a dataset, all from one prefix (which may contain dots)."""

    prefix: Path

    @property
    def bin(self) -> Path:
        """Token ids."""
        return Path(f"{self.prefix}.bin")

    @property
    def idx(self) -> Path:
        """Lengths and offsets of the documents."""
        return Path(f"{self.prefix}.idx")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that made the ids."""
        return Path(f"{self.prefix}.tokenizer.json")

    @property
    def summary(self) -> Path:
        """The :class:`DataSummary`; written last, so its presence says that the others are whole."""
        return Path(f"{self.prefix}.json")

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file, in the order in which they are put in place."""
        return (self.tokenizer, self.bin, self.idx, self.summary)


def check_data(run: RunSpec, *, read_tokens: bool = False) -> tuple[DataSummary, ...]:
    """Whether the data of a run is there, whole, made by the run's tokenizer, and large enough.

    Args:
        run: with absolute data paths, as ``spec.load_run`` gives it.
        read_tokens: also hash the whole ``.bin``; otherwise only its size is compared.

    Returns:
        The summary of every dataset, in the run's order.

    Raises:
        DataError: one line on the first thing that is wrong.
    """
    datasets = [DataFiles(Path(one.path)) for one in run.data.datasets]
    return tuple(_check_dataset(run, files, read_tokens) for files in datasets)


def _check_dataset(run: RunSpec, files: DataFiles, read_tokens: bool) -> DataSummary:
    summary = read_summary(files)
    lengths = _read_lengths(files, summary)
    if read_tokens and file_sha256(files.bin) != summary.bin_sha256:
        raise DataError(f"data file {files.bin} was changed after it was built; {_REBUILD}")
    _check_tokenizer(load_tokenizer(run.data.tokenizer), summary, run, files)
    _check_parts(run, lengths, files)
    return summary


def read_summary(files: DataFiles) -> DataSummary:
    """The summary next to the data.

    Raises:
        DataError: missing or damaged.
    """
    where = f"data summary {files.summary}"
    try:
        document = json.loads(read_bytes(files.summary, "data summary").decode())
        return validate(document, DataSummary, where)
    except FileError as error:
        raise DataError(f"{error}, or build the data with 'eeplan data build'") from None
    except SchemaError as error:
        raise DataError(f"{error}; {_REBUILD}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; {_REBUILD}") from None


def part_documents(data: DataSpec, documents: int) -> dict[Part, range]:
    """Which documents of a dataset each part holds, rounded as megatron's dataset builder rounds."""
    weights = [float(weight) for weight in data.split.split(",")]
    shares = np.array(weights) / np.sum(weights)
    ends = (float(shares[0]), float(shares[0]) + float(shares[1]), float(np.cumsum(shares)[-1]))
    bounds = [0, *(round(end * documents) for end in ends)]
    return {part: range(bounds[i], bounds[i + 1]) for i, part in enumerate(PARTS)}


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_lengths(files: DataFiles, summary: DataSummary) -> NDArray[np.int32]:
    """Tokens of each document, after comparing ``.idx``, ``.bin`` and summary with each other."""
    for path in (files.idx, files.bin):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist; {_REBUILD}")
    raw = read_bytes(files.idx, "data index")
    lengths, dtype = _parse_index(raw, files.idx)
    found, expected = files.bin.stat().st_size, int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if found != expected:
        raise DataError(
            f"data file {files.bin} has {found} bytes, its index accounts for {expected}; one of them is "
            f"truncated or from another build; {_REBUILD}"
        )
    if hashlib.sha256(raw).hexdigest() != summary.idx_sha256 or found != summary.bin_bytes:
        raise DataError(f"data index {files.idx} does not belong to {files.summary}; {_REBUILD}")
    return lengths


def _parse_index(raw: bytes, path: Path) -> tuple[NDArray[np.int32], np.dtype[np.integer]]:
    """Lengths and token type of an ``.idx``, with every field checked against the others."""

    def damaged(what: str) -> DataError:
        return DataError(f"data index {path} {what}; {_REBUILD}")

    if not raw.startswith(_MAGIC[: len(raw)]) or not raw:
        raise damaged("is not a megatron index (it does not begin with MMIDIDX)")
    if len(raw) < _HEADER.size:
        raise damaged(f"is truncated: {len(raw)} bytes, its header alone has {_HEADER.size}")
    _, version, code, count, boundaries = _HEADER.unpack_from(raw)
    if version != _VERSION:
        raise damaged(f"has version {version}, expected {_VERSION}")
    if code not in _DTYPES:
        raise damaged(f"has token type code {code}, expected 4 (int32) or 8 (uint16)")
    expected = _HEADER.size + 12 * count + 8 * boundaries
    if len(raw) != expected:
        state = "is truncated" if len(raw) < expected else "is too long"
        raise damaged(f"{state}: {len(raw)} bytes, its header announces {expected}")
    dtype = _DTYPES[code]
    lengths = np.frombuffer(raw, np.int32, count, _HEADER.size)
    offsets = np.frombuffer(raw, np.int64, count, _HEADER.size + 4 * count)
    documents = np.frombuffer(raw, np.int64, boundaries, _HEADER.size + 12 * count)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if count == 0 or lengths.min() <= 0 or offsets[0] != 0 or not np.array_equal(offsets[1:], ends[:-1]):
        raise damaged("is corrupt: lengths and offsets contradict each other")
    if not np.array_equal(documents, np.arange(count + 1)):
        raise damaged("is corrupt: its documents are not one sequence each")
    return lengths, dtype


def _check_tokenizer(tokenizer: Tokenizer, summary: DataSummary, run: RunSpec, files: DataFiles) -> None:
    if tokenizer.sha256 != summary.tokenizer_sha256:
        raise DataError(
            f"tokenizer {run.data.tokenizer} is not the one that {files.bin} was built with "
            f"(sha256 {tokenizer.sha256[:12]}…, expected {summary.tokenizer_sha256[:12]}…); "
            f"use {files.tokenizer}"
        )
    if tokenizer.vocab_size > run.model.vocab_size:
        raise DataError(
            f"tokenizer {run.data.tokenizer} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{run.model.vocab_size}; set model.vocab_size to {tokenizer.vocab_size}"
        )


def _check_parts(run: RunSpec, lengths: NDArray[np.int32], files: DataFiles) -> None:
    needed = run.training.seq_length + 1
    weights = dict(zip(PARTS, map(float, run.data.split.split(",")), strict=True))
    for part, documents in part_documents(run.data, len(lengths)).items():
        tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        if weights[part] > 0 and tokens < needed:
            raise DataError(
                f"the {part} part of data.split {run.data.split!r} is {len(documents)} of the {len(lengths)} "
                f"documents of {files.prefix} with {tokens} tokens; one sequence needs {needed} "
                "(seq_length + 1); give more or longer documents, another split, or a shorter seq_length"
            )
