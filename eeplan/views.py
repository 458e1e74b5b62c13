"""Results for people: the same tables drawn with rich on a terminal, and as plain stable lines elsewhere.

Only turns finished results into text; what is machine-readable is the command's own JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from eeplan import decode_views
from eeplan.report import words

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table as RichTable

    from eeplan.profile import OpProfile

_ASCII = str.maketrans({words.THIN: " ", words.MINUS: "-", words.MISSING: "-"})
_SHORT = 24
"""Characters of a choice that its reason may follow on the same line."""
_STATUS_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; without ``columns`` it is a list of names and values."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    sentences: bool = False
    """Cells are a name, a choice, and sentences about it, which get lines of their own."""
    notes: tuple[str, ...] = ()
    """Sentences below the table."""


def show(tables: Iterable[Table], stream: TextIO) -> None:
    """Print tables to ``stream`` in the form that suits it."""
    if stream.isatty():
        _show_rich(tables, stream)
        return
    for index, table in enumerate(tables):
        print("\n" * bool(index) + plain(table), file=stream)


def plain(table: Table) -> str:
    """The table as lines with aligned columns, one row a line; sentences stand below their row."""
    if table.sentences:
        return "\n".join([table.title, *(line for row in table.rows for line in _with_sentences(table, row))])
    rows = [table.columns, *table.rows] if table.columns else list(table.rows)
    widths = _widths(rows)
    lines = ["  " + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *(f"  {note}" for note in table.notes)])


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Of each column its widest cell."""
    columns = max(map(len, rows), default=0)
    return [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]


def _with_sentences(table: Table, row: tuple[str, ...]) -> list[str]:
    named = zip(table.columns[2:], row[2:], strict=True)
    return [f"  {row[0]}: {row[1]}", *(f"    {name}: {text}" for name, text in named if text)]


def profile_tables(profile: OpProfile) -> tuple[Table, ...]:
    """Where a profile was measured, and what each op costs."""
    rows = tuple(
        (
            c.op + (" (extrapolated)" if c.extrapolated else ""),
            str(c.micro_batch_size),
            str(c.forward.n),
            _text(words.seconds(c.forward.mean_s)),
            _text(words.seconds(c.backward.mean_s)),
            _text(words.size(c.kept_bytes)),
        )
        for c in profile.ops
    )
    device = profile.device
    p2p = profile.p2p
    return (
        Table(
            f"profile of {device.name} ({words.plural(device.cores, 'core')}): {profile.processes} ranks, "
            f"{words.plural(profile.threads, 'thread')} each, {profile.shape.precision}",
            rows,
            ("op", "micro batch", "n", "forward, mean", "backward, mean", "kept"),
        ),
        Table(
            "messages, optimizer, machine",
            (
                (
                    "point to point",
                    _text(words.seconds(p2p.latency_s)),
                    f"{_text(words.size(p2p.bandwidth_bytes_per_s))}/s",
                ),
                ("samples disturbed by other work", words.percent(profile.disturbed_share, 0)),
                (
                    "optimizer",
                    _text(words.seconds(profile.optimizer.per_parameter_s * 1e6)),
                    "per million parameters",
                ),
            ),
        ),
        *(table_of(decode_views.costs_cells(costs)) for costs in profile.decode),
    )


def summary_tables(summary: Mapping[str, Any], page: Path) -> tuple[Table, ...]:
    """A report's summary: predicted beside measured, losses, and where the page is."""
    predicted, measured, error = summary["predicted"], summary["measured"], summary["error"]
    rows = [
        (
            "iteration",
            _text(words.seconds(predicted["iteration_time_s"])),
            _text(words.seconds(measured["iteration_time_s"])),
            _text(words.signed_percent(error["iteration_time"])),
        )
    ]
    rows += [_part_row(name, part) for name, part in summary.get("parts", {}).items()]
    peaks = zip(predicted["peak_bytes"], measured["peak_bytes"], error["peak_bytes"], strict=True)
    rows += [
        (
            f"peak of stage {index}",
            _text(words.size(expected)),
            _text(words.size(found)),
            _text(words.signed_percent(off)),
        )
        for index, (expected, found, off) in enumerate(peaks)
    ]
    losses = tuple((name, f"{first:.3f}", f"{last:.3f}") for name, (first, last) in summary["losses"].items())
    return (
        Table("one iteration", tuple(rows), ("", "predicted", "measured", "error")),
        Table("loss, nats per token", losses, ("exit", "first", "last")),
        *_replanned_table(summary.get("replanned")),
        Table("report", ((str(page),),)),
    )


def _part_row(name: str, part: Mapping[str, Any]) -> tuple[str, str, str, str]:
    largest = max(abs(part["predicted"]), abs(part["measured"]))
    predicted, measured = (
        _text(words.quantity(part[source], part["unit"], largest)) for source in ("predicted", "measured")
    )
    label = f"  {name}" if name[0].islower() else name.lower()
    return label, predicted, measured, _text(words.signed_percent(part["error"]))


def _replanned_table(replanned: Mapping[str, Any] | None) -> tuple[Table, ...]:
    """What a plan that knows the measured usage decides otherwise; no table where nothing is known."""
    if replanned is None:
        return ()
    if "problem" in replanned:
        return (Table("planned again", (("impossible", replanned["problem"]),)),)
    changed = tuple(
        (one["subject"], f"{_text(one['after'])} (was {_text(one['before'])})", one["why"])
        for one in replanned["changes"]
        if one["before"] != one["after"]
    )
    title = "planned again with the usage that was measured"
    return (Table(title, changed or (("nothing changes", "", ""),), ("what", "now", "why"), sentences=True),)


def doctor_table(checks: Sequence[Mapping[str, str]]) -> Table:
    """Findings of `eeplan doctor`."""
    rows = tuple((c["status"], c["name"], c["detail"], c["remedy"]) for c in checks)
    return Table("doctor", rows, ("", "check", "found", "what to do"))


def bench_table(result: Mapping[str, Any]) -> Table:
    """Evaluations per second of each way to get a makespan."""
    rows = tuple(
        (
            case["evaluator"],
            str(case["p"]),
            str(case["m"]),
            _text(words.number(case["configs_per_s"])),
            _text(words.seconds(1 / case["configs_per_s"])),
        )
        for case in result["cases"]
    )
    return Table("simulator", rows, ("evaluator", "P", "M", "evaluations/s", "each"))


def record_table(title: str, record: Mapping[str, Any]) -> Table:
    """The scalar entries of a result, one a line; nested ones by dotted names."""
    return Table(title, tuple((name, _value(value)) for name, value in _flat(record)))


def plain_text(phrase: str) -> str:
    """Plain spaces and hyphens, which a script can search for."""
    return _text(phrase)


def _show_rich(tables: Iterable[Table], stream: TextIO) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(Text(table.title, style="bold"))
        console.print(
            Padding(
                _rich_sentences(table) if table.sentences else _rich_table(table, console.width - 2),
                (0, 0, 0, 2),
            )
        )
        for note in table.notes:
            console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))


def _rich_table(table: Table, width: int) -> RichTable:
    """Columns as wide as their cells where all but the last fit, so that only the last may wrap."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, show_header=bool(table.columns), pad_edge=False, padding=(0, 2, 0, 0))
    widths = _widths([table.columns, *table.rows])
    fits = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1:], default=0) // 3 <= width
    for index in range(len(widths)):
        name = table.columns[index] if table.columns else ""
        style = "cyan" if index == 0 else None
        keeps = fits and index + 1 < len(widths)
        drawn.add_column(name, style=style, header_style="dim", overflow="fold", no_wrap=keeps)
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_STATUS_STYLE.get(cell, "")) for cell in row))
    return drawn


def _rich_sentences(table: Table) -> RichTable:
    """A name on the left; on the right the choice, then its sentences, dim where they say what is not."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="cyan", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, choice, *sentences in table.rows:
        text = Text(choice, style="bold")
        for heading, sentence in zip(table.columns[2:], sentences, strict=True):
            if not sentence:
                continue
            is_reason = heading == table.columns[2]
            on_same_line = is_reason and len(choice) <= _SHORT
            text.append("  " if on_same_line else "\n")
            style = "not bold" if is_reason else "not bold dim"
            text.append(sentence if is_reason else f"{heading}: {sentence}", style=style)
        drawn.add_row(name, text)
    return drawn


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return str(value)


def table_of(cells: decode_views.Cells) -> Table:
    """The table of these cells."""
    return Table(cells.title, tuple(tuple(map(_text, row)) for row in cells.rows), cells.columns)


def _text(phrase: str) -> str:
    """Plain spaces and hyphens, which a script can search for."""
    return phrase.translate(_ASCII)
