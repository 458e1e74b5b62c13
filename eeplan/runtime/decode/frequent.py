"""Tokens that are frequent in a text: candidates that need no exit before them (see ``exit_check``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import DataError, DecodeError
from eeplan.runtime.data import dataset_of_file
from eeplan.runtime.dataset_files import DataFiles, read_summary
from eeplan.runtime.decode.policy import Candidates, candidates_of
from eeplan.runtime.tokenizer import Tokenizer
from eeplan.spec import RunSpec

MOST_TOKENS = 1 << 24
"""More of a dataset would not change which tokens are frequent in it."""


@dataclass(frozen=True, slots=True)
class AskedCandidates:
    """A shortlist as a command line asks for it, nothing checked."""

    number: int = 0
    source: str | None = None
    """None is ``frequent`` where a text to count in is given, else ``previous_exit``."""
    frequent_from: Path | None = None
    """The text to count in; None is what the model was trained on."""
    measured: bool = False

    @property
    def wants_frequent(self) -> bool:
        """Whether frequent tokens must be known."""
        return self.source == "frequent" or self.frequent_from is not None

    def resolved(self, frequent: Sequence[int]) -> Candidates:
        """Checked.

        Args:
            frequent: tokens, most frequent first, where they are wanted.

        Raises:
            DecodeError: out of range, or contradicting each other.
        """
        if self.frequent_from is not None and self.source not in (None, "frequent"):
            raise DecodeError(
                f"candidate source is '{self.source}', and tokens are to be counted in {self.frequent_from}; "
                "leave one of both out"
            )
        source = "previous_exit" if self.frequent_from is None else "frequent"
        if self.source is not None:
            source = self.source
        return candidates_of(self.number, source, frequent, self.measured)


def known_frequent(asked: AskedCandidates, run: RunSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Frequent tokens where they are wanted, by the text given or by the model's own training data.

    Raises:
        DecodeError: what is asked for makes no sense. DataError: no such text, or of another tokenizer.
    """
    # Whatever is wrong without looking at a text is said first.
    check_number(asked.number, tokenizer)
    asked.resolved(range(asked.number))
    if not asked.wants_frequent:
        return ()
    if asked.frequent_from is not None:
        return _ranked(_shares(asked.frequent_from, tokenizer))
    shares = np.zeros(tokenizer.vocab_size)
    for one in run.data.datasets:
        if not DataFiles(Path(one.path)).summary.is_file():
            raise DataError(
                f"the model's training data {one.path} is not there any more to find frequent tokens in; "
                "give a text with --frequent-from PREFIX|FILE"
            )
        shares += one.weight * _shares(Path(one.path), tokenizer)
    return _ranked(shares)


def check_number(number: int, tokenizer: Tokenizer) -> None:
    """Refuse a shortlist that no vocabulary fills.

    Raises:
        DecodeError: it is longer than the vocabulary, or shorter than nothing.
    """
    if not 0 <= number <= tokenizer.vocab_size:
        raise DecodeError(
            f"candidates is {number}; expected 0 for none, or at most the {tokenizer.vocab_size} tokens of "
            "the vocabulary"
        )


def _shares(data: Path, tokenizer: Tokenizer) -> NDArray[np.float64]:
    """Share of each token in a dataset or a text file."""
    if DataFiles(data).summary.is_file():
        return _of_dataset(data, tokenizer)
    with dataset_of_file(data, tokenizer) as (prefix, _):
        return _of_dataset(prefix, tokenizer)


def _of_dataset(prefix: Path, tokenizer: Tokenizer) -> NDArray[np.float64]:
    files = DataFiles(prefix)
    summary = read_summary(files)
    if summary.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(
            f"dataset {prefix} was made by another tokenizer than the checkpoint's; give the text itself, or "
            "build the dataset with the checkpoint's tokenizer.json"
        )
    try:
        tokens = np.fromfile(files.bin, dtype=np.dtype(summary.token_dtype), count=MOST_TOKENS)
    except OSError as error:
        raise DataError(f"data file {files.bin} cannot be read ({error.strerror}); build it again") from None
    if not len(tokens) or int(tokens.max()) >= tokenizer.vocab_size or int(tokens.min()) < 0:
        raise DataError(f"data file {files.bin} does not hold tokens of its tokenizer; build it again")
    return np.bincount(tokens, minlength=tokenizer.vocab_size) / len(tokens)


def _ranked(shares: NDArray[np.float64]) -> tuple[int, ...]:
    """Tokens that occur, most frequent first, of equally frequent ones the smaller id."""
    order = np.argsort(-shares, kind="stable")
    return tuple(order[: int((shares > 0.0).sum())].tolist())
