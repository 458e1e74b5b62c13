"""Real text that every Python brings: its language reference and the sources of its standard library.

The reference topics (``pydoc_data.topics``, 0.47 MB) are English prose; the modules are code with docstrings
and comments. Each text stands in the corpus once: docstrings are not extracted besides, since a copy in the
training part of what validation asks would make losses look better than they are. Left out are tests, tables
that a program wrote, and packages that many installations lack.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from eeplan.errors import DataError

__all__ = ["DEFAULT_SIZE_BYTES", "demo_corpus"]

DEFAULT_SIZE_BYTES = 6_000_000

_TESTS = frozenset({"test", "tests", "idle_test", "turtledemo", "__phello__"})
_GENERATED = frozenset({"encodings", "pydoc_data"})
"""Tables made from Unicode data; the topics themselves, which are documents of their own."""
_OFTEN_ABSENT = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "site-packages", "dist-packages"}
)
"""In packages of their own on some systems, or not of the library at all."""
_LONGEST_LINE = 400
_MOST_DIGITS = 0.075
"""A source with a longer line, or a larger share of digits, is data rather than text."""


def demo_corpus(size_bytes: int = DEFAULT_SIZE_BYTES) -> list[tuple[str, str]]:
    """Documents of real English and Python text, about ``size_bytes`` of UTF-8 in all.

    The topics come first into the choice, then modules, until the next one would exceed the size. Choice and
    order follow hashes of the names, not the alphabet, so that any stretch of documents (a validation part at
    the end) is a fair sample. The same Python gives the same corpus.

    Args:
        size_bytes: upper limit; at least one document is returned.

    Returns:
        (name, text) pairs, e.g. ``("topics/assignment", …)`` and ``("lib/json/decoder.py", …)``.

    Raises:
        DataError: not a positive size, or this Python has neither topics nor sources.
    """
    if size_bytes <= 0:
        raise DataError(f"corpus size is {size_bytes} bytes; give a positive number")
    chosen: dict[str, str] = {}
    total = 0
    for name, source in [*_shuffled(_topics()), *_shuffled(_modules())]:
        text = source if isinstance(source, str) else _read_module(source)
        if text is None or text in chosen:
            continue
        total += len(text.encode())
        if chosen and total > size_bytes:
            break
        chosen[text] = name
    if not chosen:
        raise DataError(
            "this Python has neither pydoc topics nor library sources to learn from; give text files instead"
        )
    # A second hash: by the first, the modules with the highest ranks are the ones left out.
    return sorted(
        ((name, text) for text, name in chosen.items()), key=lambda document: _rank("order", document[0])
    )


def _topics() -> dict[str, str | Path]:
    try:
        from pydoc_data import topics
    except ImportError:  # minimal installations leave it out; the modules remain
        return {}
    return {f"topics/{name}": text for name, text in topics.topics.items()}


def _modules() -> dict[str, str | Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, str | Path] = {}
    for folder, subfolders, names in os.walk(root):
        # Pruned in place: os.walk does not enter what is removed (site-packages can be huge).
        subfolders[:] = [name for name in subfolders if _is_wanted(name)]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and not name.startswith("_sysconfigdata"):
                found[f"lib/{path.relative_to(root).as_posix()}"] = path
    return found


def _is_wanted(folder: str) -> bool:
    return folder not in _TESTS | _GENERATED | _OFTEN_ABSENT and not folder.startswith("config-")


def _read_module(path: Path) -> str | None:
    """Source of a module; None for one that is empty, not UTF-8, or a table of data."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    longest = max(map(len, text.splitlines()), default=0)
    digits = sum(map(text.count, "0123456789"))
    is_table = longest > _LONGEST_LINE or digits > _MOST_DIGITS * len(text)
    return text if text.strip() and not is_table else None


def _shuffled(documents: dict[str, str | Path]) -> list[tuple[str, str | Path]]:
    return sorted(documents.items(), key=lambda document: _rank("choice", document[0]))


def _rank(purpose: str, name: str) -> str:
    return hashlib.sha256(f"{purpose} {name}".encode()).hexdigest()
