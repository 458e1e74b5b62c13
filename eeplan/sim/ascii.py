"""A pipeline's timeline as text: one row a stage, for terminals, logs and test failures.

    stage 0 |0123......<04<15<2.<3.<4.<5|
    stage 1 |.012....<03<14<25<3.<4.<5..|
    stage 2 |..01..<02<13<24<35<4.<5....|
    stage 3 |...0<01<12<23<34<45<5......|
             0         10        20 ns

A forward is the last digit of its microbatch, all along; a backward is ``<`` and then the digit. Columns are
a sample of time: an op thinner than a column shows only where nothing else does.
"""

from __future__ import annotations

from eeplan.timeline import Span, Timeline

IDLE = "."
_WHOLE_ITERATION = {"grad_sync": "+", "optimizer": "*"}
_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1))
_TICK_COLUMNS = 10


def render(timeline: Timeline, width: int = 110) -> str:
    """Draw ``timeline`` with rows of at most ``width`` columns, labels included.

    Returns:
        Lines joined by newlines: one a stage, the time axis, and what the marks mean.

    Raises:
        ValueError: too narrow for a label and ten columns.
    """
    label_width = len(f"stage {timeline.num_stages - 1} ")
    columns = width - label_width - 2
    if columns < 10:
        raise ValueError(f"width {width} is too narrow; give at least {label_width + 12}")
    end_ns = max(timeline.end_ns, 1)
    # No column is shorter than a nanosecond: a short timeline takes fewer columns.
    columns = min(columns, end_ns)
    rows = [
        f"{f'stage {stage}':<{label_width}}|{_row(spans, columns, end_ns)}|"
        for stage, spans in enumerate(timeline.spans)
    ]
    margin = " " * (label_width + 1)
    legend = f"{margin}digit: forward of that microbatch; <digit: its backward; {IDLE} idle"
    kinds = {span.kind for spans in timeline.spans for span in spans}
    legend += "".join(f"; {mark} {kind}" for kind, mark in _WHOLE_ITERATION.items() if kind in kinds)
    return "\n".join([*rows, margin + _axis(columns, end_ns), legend])


def _row(spans: tuple[Span, ...], columns: int, end_ns: int) -> str:
    cells = [IDLE] * columns
    thin = []
    for span in spans:
        first, behind = (time * columns // end_ns for time in (span.start_ns, span.end_ns))
        if behind == first:
            thin.append((min(first, columns - 1), span))
        else:
            cells[first:behind] = _marks(span, behind - first)
    for column, span in thin:
        if cells[column] == IDLE:
            cells[column] = _marks(span, 1)
    return "".join(cells)


def _marks(span: Span, length: int) -> str:
    if span.kind in _WHOLE_ITERATION:
        return _WHOLE_ITERATION[span.kind] * length
    digit = str(span.microbatch % 10)
    return digit * length if span.kind == "forward" else "<" + digit * (length - 1)


def _axis(columns: int, end_ns: int) -> str:
    """Ticks at round times under their columns, and the unit."""
    unit, unit_ns = next(((u, n) for u, n in _UNITS if end_ns >= 2 * n), _UNITS[-1])
    step_ns = _round_step(end_ns * _TICK_COLUMNS / columns)
    axis = ""
    for time_ns in range(0, end_ns + 1, step_ns):
        axis = f"{axis:<{time_ns * columns // end_ns}}{time_ns / unit_ns:g} "
    return f"{axis}{unit}"


def _round_step(at_least_ns: float) -> int:
    """Smallest 1, 2 or 5 times a power of ten that is not below ``at_least_ns``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= at_least_ns:
                return factor * power
        power *= 10
