"""Small pieces of HTML. Everything that comes from a file is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import pandas as pd


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def section(name: str, heading: str, *parts: str) -> str:
    """A section with its heading; empty parts vanish."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{body}\n</section>'


def columns(*parts: str, kind: str = "") -> str:
    """Parts side by side on a wide page, one above the other on a narrow one; empty parts vanish."""
    parts = tuple(part for part in parts if part)
    return (
        f'<div class="{f"columns {kind}".strip()}">'
        + "".join(f"<div>{part}</div>" for part in parts)
        + "</div>"
    )


def figure(svg: str, caption: str, file: str, wide: bool = False) -> str:
    """A drawing with its caption and the name of its PNG file. A wide one scrolls on a narrow page."""
    return (
        f'<figure{_class("wide" if wide else "")}><div class="scroll">{svg}</div>'
        f'<figcaption>{escape(caption)} <span class="file">{escape(file)}</span></figcaption></figure>'
    )


def table(frame: pd.DataFrame, kind: str = "", caption: str = "") -> str:
    """A table of words: first column left, others right unless ``kind`` says ``prose``."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in frame.columns)
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    ]
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table{_class(kind)}>{title}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Term and value pairs."""
    rows = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in pairs)
    return f'<dl class="facts">{rows}</dl>'


def commands(lines: Sequence[str]) -> str:
    """Shell commands, one a line."""
    return "<pre><code>" + "\n".join(escape(line) for line in lines) + "</code></pre>"


def swatch(number: int | None, label: str) -> str:
    """A key of the legend: the mark of exit ``number``, or of plain text when None."""
    return f'<span class="key"><span class="{mark(number)}">{escape(label)}</span></span>'


def mark(number: int | None) -> str:
    """CSS class of a token that left at early exit ``number`` (from 0), or of one that did not."""
    return "token" if number is None else f"token early e{number % 6}"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
