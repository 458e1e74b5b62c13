"""More than 20 MB of real text for the long campaigns, pinned by SHA-256.

Perl's manual (technical English), the Jargon File and the fortune files come as Debian 12 packages; the
modules of Python's standard library come with Python. On Debian or Ubuntu with the bookworm archive::

    apt-get download perl-doc=5.36.0-7+deb12u3 jargon-text=4.4.7-4.1 fortunes=1:1.99.1-7.3

in the text folder; elsewhere the same files are in the Debian archive.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eeplan.runtime.corpus import demo_corpus

PACKAGES = {
    "perl-doc_5.36.0-7+deb12u3_all.deb": "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
    "jargon-text_4.4.7-4.1_all.deb": "17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
    "fortunes_1%3a1.99.1-7.3_all.deb": "41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
}
"""Debian packages by file name, and their SHA-256."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in an order that makes any stretch of them a fair sample."""

    names: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def sha256(self) -> str:
        """Of names and texts in order: two machines with the same value train on the same text."""
        digest = hashlib.sha256()
        for name, text in zip(self.names, self.texts, strict=True):
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()


def missing_packages(folder: Path) -> list[str]:
    """Files of :data:`PACKAGES` that ``folder`` lacks or holds in another version."""
    return [
        name
        for name, digest in PACKAGES.items()
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def read_corpus(folder: Path) -> Corpus:
    """All documents; the packages lie in ``folder`` and are checked.

    Raises:
        FileNotFoundError: a package is missing or is another version.
    """
    missing = missing_packages(folder)
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; see the head of {Path(__file__).name}")
    documents = {f"python/{name}": text for name, text in demo_corpus(100_000_000)}
    with tempfile.TemporaryDirectory() as name:
        for package in PACKAGES:
            subprocess.run(["dpkg-deb", "-x", str(folder / package), name], check=True)
        documents |= _unpacked(Path(name))
    order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return Corpus(tuple(order), tuple(documents[name] for name in order))


def sections(texts: tuple[str, ...], size: int = 2_000) -> list[str]:
    """Parts of about ``size`` characters in a mixed order: many documents, none of which stands for a file.

    What is concluded from a sample of documents, as in calibration, needs many of them.
    """
    parts = {part for text in texts for part in _parts(text, size) if part.strip()}
    return sorted(parts, key=lambda part: hashlib.sha256(part.encode()).hexdigest())


def _unpacked(root: Path) -> dict[str, str]:
    """Manual pages in POD, the Jargon File, and one document for each fortune file."""
    found = {}
    for path in sorted(root.rglob("*.pod")):
        text = _utf8(path.read_bytes())
        if text is not None:
            found[f"perl/{path.name}"] = text
    jargon = _utf8(gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()))
    # In parts, so that no document is a tenth of all text.
    for index, part in enumerate(_parts(jargon or "", 100_000)):
        found[f"jargon/{index}"] = part
    for path in sorted((root / "usr/share/games/fortunes").iterdir()):
        text = None if path.suffix or path.is_symlink() else _utf8(path.read_bytes())
        if text is not None:
            found[f"fortunes/{path.name}"] = text
    return found


def _utf8(raw: bytes) -> str | None:
    """Text; None where an old document is in another encoding."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _parts(text: str, size: int) -> list[str]:
    """Consecutive parts of about ``size`` characters, cut at blank lines."""
    parts, current, length = [], list[str](), 0
    for paragraph in text.split("\n\n"):
        current.append(paragraph)
        length += len(paragraph)
        if length >= size:
            parts.append("\n\n".join(current))
            current, length = [], 0
    return [*parts, "\n\n".join(current)] if current else parts
