"""Progress in plain lines and in bars."""

from __future__ import annotations

import io

from eeplan.console import PlainProgress, follow_training, open_progress


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_plain_lines_come_at_most_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    with progress.step("work", announce=True):
        for second in range(25):
            clock.now_s = second
            progress.update(second, 25, "part")
    assert stream.getvalue().splitlines() == [
        "work …",
        "work: 10/25 part",
        "work: 20/25 part",
        "work: done in 24.0 s",
    ]


def test_a_failed_step_is_not_called_done() -> None:
    stream = io.StringIO()
    try:
        with PlainProgress(stream).step("work"):
            raise ValueError
    except ValueError:
        pass
    assert stream.getvalue() == ""


def test_bars_on_a_terminal() -> None:
    stream = FakeTerminal()
    with open_progress(stream) as progress:
        with progress.step("first"):
            progress.update(1, 2, "half")
            progress.line("a [log] line")
        with progress.step("second"):
            pass
    text = stream.getvalue()
    assert "\x1b" in text
    for part in ("first", "2/2", "a [log] line", "second", "1/1"):
        assert part in text


def test_training_lines_move_the_bar() -> None:
    class Recorder(PlainProgress):
        seen: tuple[int, int] | None = None

        def update(self, done: int, total: int, what: str = "") -> None:
            self.seen = (done, total)

    recorder = Recorder(io.StringIO())
    on_line = follow_training(recorder)
    on_line("loading")
    assert recorder.seen is None
    on_line(" [2025-01-01 00:00:00] iteration       12/      60 | consumed samples: 384 |")
    assert recorder.seen == (12, 60)
