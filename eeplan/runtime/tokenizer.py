"""Text to token ids and back: byte-level, or a byte-level BPE trained with the ``tokenizers`` library.

A tokenizer is one JSON file. Its SHA-256 is taken over that file's canonical form, so that data and model can
tell whether they speak the same vocabulary. Both kinds are lossless on any text, never produce the
end-of-text token from text, and need neither torch nor megatron-core.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eeplan.errors import DataError, FileError
from eeplan.files import read_bytes, sha256_bytes, write_text

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "END_OF_TEXT",
    "BpeTokenizer",
    "ByteTokenizer",
    "TextStream",
    "Tokenizer",
    "byte_tokenizer",
    "load_tokenizer",
    "train_bpe",
]

END_OF_TEXT = "<|endoftext|>"
"""Name of the token that closes a document; only its id stands in data, text never encodes to it."""

BYTES = 256
MIN_BPE_VOCAB_SIZE = BYTES + 2
"""All bytes, one merge, end-of-text."""

_FORMAT = "eeplan.tokenizer"
_FORMAT_VERSION = 1
_REMAKE = "make it again with 'eeplan data build'"
_PIECE_CHARS = 1 << 16
# The pre-tokenizer makes such a newline a token of its own, so a text cut behind it encodes to the same ids.
_SEAM = re.compile(r"[!-~]\n(?=[!-~])")


class Tokenizer(ABC):
    """A fixed vocabulary of byte strings, ids 0 to ``vocab_size - 1``, one of them the end-of-text token."""

    kind: ClassVar[str]

    def __init__(self, table: Sequence[bytes], eod: int) -> None:
        """``table[i]`` holds the bytes of token i; ``eod`` is the end-of-text token, which has none."""
        self._table = tuple(table)
        self.eod = eod

    @property
    def vocab_size(self) -> int:
        """Number of tokens, end-of-text included."""
        return len(self._table)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without end-of-text.

        Raises:
            DataError: the text holds a lone surrogate, which no UTF-8 file can.
        """
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` of each text; quicker than one by one."""

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """Bytes of each token; empty for end-of-text.

        Raises:
            DataError: an id outside the vocabulary (a padded row of the vocabulary matrix was sampled).
        """
        table, size = self._table, len(self._table)
        result = []
        for token_id in ids:
            if not 0 <= token_id < size:
                raise DataError(
                    f"token id {token_id} is outside the tokenizer's vocabulary of {size}; mask the logits "
                    "of padded ids, or use the tokenizer that the model was trained with"
                )
            result.append(table[token_id])
        return result

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; end-of-text vanishes, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(ids)).decode("utf-8", errors="replace")

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """What each token adds to the text; the parts concatenate to :meth:`decode` of all.

        A character of several tokens appears at its last one.
        """
        stream = TextStream(self)
        texts = [stream.push(token_id) for token_id in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of the file that :meth:`save` writes."""
        return sha256_bytes(self._dump().encode())

    def save(self, path: Path) -> None:
        """Write the tokenizer file, whole or not at all.

        Raises:
            FileError: not writable.
        """
        write_text(path, self._dump())

    @abstractmethod
    def _model(self) -> dict[str, Any]:
        """What the file holds besides kind and sizes."""

    def _dump(self) -> str:
        document = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "model": self._model(),
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


class ByteTokenizer(Tokenizer):
    """Token i < 256 is byte i; 256 is end-of-text."""

    kind = "byte"

    def __init__(self) -> None:
        super().__init__([*(bytes([value]) for value in range(BYTES)), b""], eod=BYTES)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(_utf8(text)) for text in texts]

    def _model(self) -> dict[str, Any]:
        return {}


class BpeTokenizer(Tokenizer):
    """Byte-level BPE over the ``tokenizers`` library: 256 bytes, learned merges, end-of-text last."""

    kind = "bpe"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """``library``: byte-level, no normalizer, holding :data:`END_OF_TEXT` as an added token."""
        # Else the library would turn the words <|endoftext|> in a text into the token that ends documents.
        library.encode_special_tokens = True
        self._library = library
        eod = library.token_to_id(END_OF_TEXT)
        byte_of = _byte_of_character()
        names = [library.id_to_token(token_id) for token_id in range(library.get_vocab_size())]
        if eod is None or None in names:
            raise ValueError(f"no token {END_OF_TEXT!r}, or ids with gaps")
        super().__init__(
            [b"" if i == eod else bytes(byte_of[c] for c in name or "") for i, name in enumerate(names)], eod
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        pieces: list[str] = []
        ends: list[int] = []
        for text in texts:
            _utf8(text)
            pieces.extend(_pieces(text))
            ends.append(len(pieces))
        encoded = self._library.encode_batch_fast(pieces, add_special_tokens=False)
        starts = [0, *ends][: len(ends)]
        return [
            [token_id for piece in encoded[start:end] for token_id in piece.ids]
            for start, end in zip(starts, ends, strict=True)
        ]

    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = json.loads(self._library.to_str())
        return model


class TextStream:
    """Turns tokens into text as they come, holding back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished.

        Raises:
            DataError: an id outside the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes([token_id])[0])

    def finish(self) -> str:
        """U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)


def byte_tokenizer() -> ByteTokenizer:
    """The byte-level tokenizer: vocabulary 257, needs no training and no library."""
    return ByteTokenizer()


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Learn a byte-level BPE; the same texts in the same order give the same file.

    Args:
        texts: training text, read once.
        vocab_size: tokens wanted, end-of-text included. A small text has fewer pairs worth merging; the
            result's own ``vocab_size`` says what it holds.

    Raises:
        DataError: ``vocab_size`` has no room for all bytes, one merge and end-of-text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise DataError(
            f"vocabulary size {vocab_size} is too small for a BPE tokenizer; give at least "
            f"{MIN_BPE_VOCAB_SIZE} (256 bytes, one merge, end of text), or use the byte tokenizer"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _pieces(text))
    library.train_from_iterator(pieces, trainer)
    library.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(library)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a tokenizer file.

    Raises:
        DataError: missing, not a tokenizer file of eeplan, of a newer format, or damaged.
    """
    path = Path(path)
    try:
        raw = read_bytes(path, "tokenizer file")
    except FileError as error:
        raise DataError(f"{error}, or make it with 'eeplan data build'") from None
    try:
        document = json.loads(raw.decode())
    except (ValueError, RecursionError):
        raise DataError(f"tokenizer file {path} is not JSON; {_REMAKE}") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise DataError(
            f"{path} is not a tokenizer file (its format is not {_FORMAT!r}); give the "
            "file that 'eeplan data build' wrote"
        )
    if document.get("format_version") != _FORMAT_VERSION:
        raise DataError(
            f"tokenizer file {path} has format_version {document.get('format_version')!r}; this eeplan reads "
            f"{_FORMAT_VERSION}; {_REMAKE}"
        )
    tokenizer = _from_document(document, path)
    stated = (document.get("vocab_size"), document.get("eod"))
    if stated != (tokenizer.vocab_size, tokenizer.eod):
        raise DataError(
            f"tokenizer file {path} states vocab_size {stated[0]!r} and eod {stated[1]!r}, but holds "
            f"{tokenizer.vocab_size} and {tokenizer.eod}; {_REMAKE}"
        )
    return tokenizer


def _from_document(document: dict[str, Any], path: Path) -> Tokenizer:
    kind = document.get("kind")
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind != BpeTokenizer.kind:
        raise DataError(f"tokenizer file {path} has kind {kind!r}; expected 'byte' or 'bpe'")
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(document.get("model")))
        return BpeTokenizer(library)
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"tokenizer file {path} holds a damaged BPE model ({reason}); {_REMAKE}") from None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which "
            "UTF-8 cannot store; remove it"
        ) from None


def _pieces(text: str) -> Iterator[str]:
    """``text`` in parts of about 64 Ki characters that encode to the same ids as the whole.

    The library keeps hundreds of bytes per token of one input, and works on several inputs at once.
    """
    start = 0
    while len(text) - start > _PIECE_CHARS:
        seam = _SEAM.search(text, start + _PIECE_CHARS)
        if seam is None:
            break
        yield text[start : seam.end()]
        start = seam.end()
    yield text[start:]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet backwards: printable Latin-1 stands for itself, other bytes follow U+0100."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = [value for first, last in ranges for value in range(ord(first), ord(last) + 1)]
    others = [value for value in range(BYTES) if value not in printable]
    shifted = {chr(BYTES + n): value for n, value in enumerate(others)}
    return {chr(value): value for value in printable} | shifted
