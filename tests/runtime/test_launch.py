"""The launcher with real processes: deaths of every kind, what the user is told, and orphans."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eeplan.errors import EeplanError, LaunchError
from eeplan.runtime import launch as launching
from eeplan.runtime.launch import launch

HERE = Path(__file__).parent
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the workers leave their process numbers; whatever a broken test leaves running is ended."""
    yield tmp_path
    for pid in marked_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def marked_processes(folder: Path) -> list[int]:
    """Living processes of the jobs whose workers wrote to ``folder``, by the environment they inherit."""
    mark = f"TEST_FOLDER={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s"
        time.sleep(0.02)


def ready(folder: Path, nproc: int) -> bool:
    return all((folder / f"rank{rank}.ready").exists() for rank in range(nproc))


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"rank{rank}.pid").read_text())


def launch_and_kill(
    folder: Path, behaviour: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str], float]:
    """Kill one of two ranks once both are ready; the error, the lines shown, seconds from kill to error."""
    monkeypatch.setenv("TEST_FOLDER", str(folder))
    killed_at = []

    def kill_when_ready() -> None:
        until(lambda: ready(folder, 2), "start of the ranks")
        killed_at.append(time.monotonic())
        os.kill(pid_of(folder, rank), signal.SIGKILL)

    killer = threading.Thread(target=kill_when_ready)
    killer.start()
    lines: list[str] = []
    with pytest.raises(LaunchError) as caught:
        launch("launch_workers", [behaviour, str(folder)], nproc=2, on_line=lines.append)
    took_s = time.monotonic() - killed_at[0]
    killer.join()
    return str(caught.value), lines, took_s


def test_lines_arrive_with_their_rank_and_threads_are_set(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "new" / "job.log"
    launch(
        "launch_workers",
        ["hello", str(folder)],
        nproc=2,
        threads_per_process=3,
        log=log,
        on_line=lines.append,
    )
    assert sorted(lines) == [
        "[rank 1] hello from 1 of 2",
        "[rank 1] threads 3",
        "hello from 0 of 2",
        "threads 3",
    ]
    assert "[rank 0] hello from 0 of 2\n" in log.read_text()


@pytest.mark.parametrize(("behaviour", "rank"), [("wait", 0), ("talk", 0), ("talk", 1)])
def test_a_killed_rank_is_named_and_ends_the_others(
    folder: Path, behaviour: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, lines, took_s = launch_and_kill(folder, behaviour, rank, monkeypatch)
    assert message.startswith(f"rank {rank} (process {pid_of(folder, rank)}) was killed by SIGKILL")
    assert "\n" not in message
    # The survivor's complaint about the lost connection is an echo and is not shown.
    assert not any("Traceback" in line for line in lines)
    assert took_s < 10.0, f"{took_s:.1f} s"
    assert marked_processes(folder) == []


def test_a_rank_deaf_to_sigterm_is_ended_and_not_blamed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, _, took_s = launch_and_kill(folder, "stubborn", 1, monkeypatch)
    assert message.startswith("rank 1 ")
    assert took_s < 15.0
    assert marked_processes(folder) == []


def test_without_the_final_sweep_grandchildren_would_live_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the count of orphans does see what a weaker launcher leaves behind."""
    monkeypatch.setattr(launching, "processes_of", lambda job: [])
    launch_and_kill(folder, "wait", 1, monkeypatch)
    assert marked_processes(folder) != []


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGKILL, "launch"),
        (signal.SIGKILL, "torchrun"),
        (signal.SIGTERM, "launch"),
        (signal.SIGINT, "launch"),
    ],
)
def test_no_orphans_when_the_launching_side_dies(
    folder: Path, number: signal.Signals, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(folder))
    # A killed process cannot remove its temporary files; let them lie with the test's own.
    monkeypatch.setenv("TMPDIR", str(folder))
    # A job in the background of a script is deaf to SIGINT, and so would be all that it starts.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from eeplan.runtime.launch import launch; "
        "launch('launch_workers', ['wait', sys.argv[1]], nproc=2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True)
    until(lambda: ready(folder, 2), "start of the ranks")
    torchrun = int(Path(f"/proc/{pid_of(folder, 0)}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent.pid if victim == "launch" else torchrun, number)
    _, error = parent.communicate(timeout=LIMIT_S)
    if victim == "torchrun":
        assert "the launcher was killed by SIGKILL and no rank is left running" in error
    hard_kill = victim == "launch" and number == signal.SIGKILL
    ranks = {pid_of(folder, 0), pid_of(folder, 1)}

    def gone() -> bool:
        alive = set(marked_processes(folder))
        # Nobody is left to sweep after a SIGKILL of the sweeper itself; the ranks die by the kernel's hand.
        return not (alive & (ranks | {torchrun}) if hard_kill else alive)

    until(gone, "end of all ranks")


def test_a_ranks_own_error_line_is_the_error(folder: Path) -> None:
    lines: list[str] = []
    with pytest.raises(EeplanError) as caught:
        launch("launch_workers", ["user_error", str(folder)], nproc=2, on_line=lines.append)
    assert str(caught.value) == "the moon is full; wait a night"
    assert type(caught.value) is EeplanError
    assert lines == []


def test_a_bug_in_a_rank_shows_its_traceback(folder: Path) -> None:
    lines: list[str] = []
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 1"):
        launch("launch_workers", ["bug", str(folder)], nproc=2, on_line=lines.append)
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "[rank 1] AssertionError: a bug of our own"


def test_an_unwritable_log_is_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot write the log"):
        launch("launch_workers", ["hello", str(tmp_path)], nproc=1, log=tmp_path / "file" / "job.log")


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "available_cores", lambda: 8)
    assert [launching.default_threads(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
